"""Whether the documents of a row are isolated, found out on the engine that will train.

In transformers isolation follows from details that fail silently, it is missing in models whose
state runs along the row (gated delta net, Mamba), and a kernel for documents of varying length
may take one row at a time only. So nothing is concluded from the model's type: tokens of one
document are changed, and the loss of the next one must stay.
"""

from dataclasses import replace

import torch

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.engines.base import Engine
from toolkit.engines.setup import EngineSetup
from toolkit.errors import PlanError

_DOCUMENT = 8
"""Tokens of a probed document, for each tensor-parallel rank."""
_ROUNDING = 0.05
"""Of the change without isolation: what may be left where experts compute other numbers of
tokens together, and round differently. A leak is of the size of the change."""


def check_isolation(engine: Engine, setup: EngineSetup) -> None:
    """Raise PlanError where a document's loss depends on another one's tokens; collective."""
    batch = _probe(setup)
    found = _change(engine, setup, batch)
    if found == 0:
        return
    if any(".experts." in name for name in setup.weights.shapes):
        crossing = _change(engine, setup, replace(batch, segments=None))
        if found < _ROUNDING * crossing:
            return
    raise PlanError(
        f"the model type {setup.model_config.model_type} does not isolate the documents of a "
        f"row: tokens of one change the loss of the next by {found:.2g}",
        fix="set data.isolate_documents to false, or choose a model with attention only",
    )


def _change(engine: Engine, setup: EngineSetup, batch: MicroBatch) -> float:
    """How much the loss of the second documents changes with the tokens of the first."""
    vocabulary = setup.model_config.get_text_config().vocab_size
    first = torch.arange(batch.input_ids.shape[1]) < batch.input_ids.shape[1] // 2
    other = torch.where(first, (batch.input_ids + 1) % vocabulary, batch.input_ids)
    # As many micro batches as a pipeline has stages: the interleaved schedule takes no fewer.
    one, two = (
        engine.evaluate([replace(batch, input_ids=tokens)] * setup.layout.pp).loss
        for tokens in (batch.input_ids, other)
    )
    return abs(one - two)


def _probe(setup: EngineSetup) -> MicroBatch:
    """Two rows of two documents each, of which the second is trained; two, because a kernel may
    isolate the documents of a single row only, and because preferences come in pairs."""
    length = 2 * _DOCUMENT * setup.layout.tp
    generator = torch.Generator().manual_seed(setup.seed)
    vocabulary = setup.model_config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (2, length + 1), generator=generator)
    place = torch.arange(length).expand(2, -1)
    document = place // (length // 2)
    fields = MicroBatch.__dataclass_fields__
    return MicroBatch(
        tokens[:, :-1],
        torch.where(document == 1, tokens[:, 1:], IGNORE_INDEX),
        loss_weights=torch.ones(2, length),
        positions=place % (length // 2),
        segments=document.int(),
        extra={name: torch.zeros(2) for name in setup.objective.reads if name not in fields},
    )
