"""Tests whether the documents of a row are isolated, on the engine that will train.

In transformers, isolation depends on details that fail silently, models whose state runs along
the row (gated delta net, Mamba, short convolutions) do not support it, and a variable-length
attention kernel may isolate a single row only. So the model's type is not trusted: one document
is replaced by another, and the loss of the next one must stay bitwise the same.
"""

from dataclasses import replace

import torch

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.engines.base import Engine
from toolkit.engines.setup import EngineSetup
from toolkit.errors import PlanError
from toolkit.models import compiled

_DOCUMENT = 8
"""Tokens of a probed document, for each tensor-parallel and context-parallel rank."""


def check_isolation(engine: Engine, setup: EngineSetup) -> None:
    """Raise PlanError if a document's loss depends on another one's tokens; collective."""
    batch = probe(setup)
    if change := isolation_error(engine, setup, batch):
        raise PlanError(
            f"the model type {setup.model_config.model_type} does not isolate the documents of "
            f"a sequence: the tokens of one change the loss of the next by {change:.2g}",
            fix="set data.isolate_documents to false, or choose a model with attention only",
        )


def isolation_error(engine: Engine, setup: EngineSetup, batch: MicroBatch) -> float:
    """Change of the loss of the second documents when two rows exchange their first ones.

    An exchange leaves every expert with the same tokens: if documents are isolated, no matrix
    product changes its shape, which could change its rounding.
    """
    # As many micro batches as a pipeline has stages: the interleaved schedule takes no fewer.
    with compiled.eager():  # graphs exist for the trained shapes only
        before, after = (
            engine.evaluate([one] * setup.layout.pp).loss for one in (batch, exchanged(batch))
        )
    return abs(after - before)


def exchanged(batch: MicroBatch) -> MicroBatch:
    """The batch with the first halves of its rows in opposite order."""
    tokens, half = batch.input_ids, batch.input_ids.shape[1] // 2
    other = torch.cat([tokens[:, :half].flip(0), tokens[:, half:]], dim=1)
    return replace(batch, input_ids=other)


def probe(setup: EngineSetup) -> MicroBatch:
    """Two rows of two documents each; only the second is trained."""
    half = _DOCUMENT * setup.layout.tp * setup.layout.cp
    generator = torch.Generator().manual_seed(setup.seed)
    vocabulary = setup.model_config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (2, 2 * half + 1), generator=generator)
    place = torch.arange(2 * half).expand(2, -1)
    fields = MicroBatch.__dataclass_fields__
    return MicroBatch(
        tokens[:, :-1],
        torch.where(place < half, IGNORE_INDEX, tokens[:, 1:]),
        loss_weights=torch.ones(2, 2 * half),
        positions=place % half,
        segments=(place // half).int(),
        extra={name: torch.zeros(2) for name in setup.objective.reads if name not in fields},
    )
