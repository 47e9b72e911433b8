"""Building an engine on this rank, with what surrounds its steps, and testing it: whether the
documents of a row are isolated, and whether the model computes the same if context-parallel
ranks spread its rows.

In transformers, both depend on details that fail silently: a state or a convolution along the
row (gated delta net, Mamba), positions that a model counts itself, attention of another kind
than the registered one, a variable-length kernel that isolates a single row only. So the type
of a model is not trusted. One document is replaced by another, and the loss of the next one
must stay bitwise the same. Log-probabilities of spread rows are compared with those of whole
ones.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.backend import BACKENDS
from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.engines.base import Engine
from toolkit.engines.setup import EngineSetup
from toolkit.errors import PlanError
from toolkit.layout import AttentionKernel
from toolkit.models import compiled
from toolkit.models.families import attention
from toolkit.registry import load

_EXACT, _ROUNDED = (1e-4, 1e-6), (0.1, 5e-4)
"""Largest difference in fp32, and in 16 bits or with fp8: relative to what the first half
of a row changes in the second, and, as a model may hardly attend, to the log-probabilities."""
_DOCUMENT = 8
"""Tokens of a probed document, for each tensor-parallel and context-parallel rank."""


def build_engine(name: str, setup: EngineSetup, *, probe: bool = True) -> Engine:
    """Build the engine `name` on this rank, and `probe` what it computes. Collective.

    Raises PlanError if the data isolates documents and the engine's model does not, or if the
    model does not compute the same with its rows spread over context-parallel ranks.
    """
    if setup.plan.model == "megatron":
        from toolkit.models.megatron import cpu

        cpu.before_import()
    spreads = setup.layout.cp > 1 and setup.plan.model == "hf"
    with refusing(setup) if spreads else nullcontext():
        engine: Engine = load(BACKENDS[name].engine)(setup)
        if spreads and probe:
            check_context(engine, setup)
    _try_first(setup.plan.attention_kernel, engine)
    if setting := setup.layout.compiles:
        _around_steps(compiled.explain_failures(setting), engine)
    if setup.recipe.data.isolates and probe:
        check_isolation(engine, setup)
    return engine


def _try_first(kernel: AttentionKernel, engine: Engine) -> None:
    """Let torch's attention try this kernel before the others. A recomputed layer, too."""
    if kernel not in ("cudnn", "flash"):
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    rest = (*names.values(), SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    order = list(dict.fromkeys((names[kernel], *rest)))
    _around_steps(sdpa_kernel(order, set_priority=True), engine)


def _around_steps(
    wrapper: Callable[[Callable[..., Any]], Callable[..., Any]], engine: Engine
) -> None:
    """Wrap all methods of an engine that compute."""
    for name in ("train_step", "evaluate", "sequence_log_probs"):
        setattr(engine, name, wrapper(getattr(engine, name)))


def check_isolation(engine: Engine, setup: EngineSetup) -> None:
    """Raise PlanError if a document's loss depends on another one's tokens. Collective."""
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
    """Two rows of two documents each. Only the second is trained."""
    half = _DOCUMENT * setup.layout.tp * setup.layout.cp
    generator = torch.Generator().manual_seed(setup.recipe.training.seed)
    vocabulary = setup.model_config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (2, 2 * half + 1), generator=generator)
    place = torch.arange(2 * half).expand(2, -1)
    fields = MicroBatch.__dataclass_fields__
    return MicroBatch(
        tokens[:, :-1],
        torch.where(place < half, IGNORE_INDEX, tokens[:, 1:]),
        positions=place % half,
        segments=(place // half).int(),
        extra={name: torch.zeros(2) for name in setup.objective.reads if name not in fields},
    )


def check_context(engine: Any, setup: EngineSetup) -> None:
    """Raise PlanError if the model depends on how its rows are split. Collective."""
    tokens = probe(setup).input_ids.to(setup.ranks.device)
    batch = MicroBatch(tokens, tokens)
    with compiled.eager(), engine.evaluating():  # graphs exist for the trained shapes only
        split: Tensor = engine.log_probs(batch)
        with _whole_rows(engine, setup):
            whole, other = (engine.log_probs(one) for one in (batch, exchanged(batch)))
    half = tokens.shape[1] // 2
    seen = _size((other - whole)[:, half:])
    exact = setup.precision == "fp32" and setup.recipe.kernels.fp8 is None
    share, rounding = _EXACT if exact else _ROUNDED
    bound = share * seen + rounding * _size(whole)
    change = _size(split - whole)
    differs = (~(change <= bound)).float()
    dist.all_reduce(differs)  # all ranks stop, or none
    if differs:
        raise _refused(setup, f"log-probabilities of whole rows differ by {change:.2g}")


def _size(values: Tensor) -> Tensor:
    """Root mean square."""
    return values.double().square().mean().sqrt()


@contextmanager
def refusing(setup: EngineSetup) -> Iterator[None]:
    """Context of building and comparing: errors of a model that does not take the registered
    attention become PlanError."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, NotImplementedError, TypeError) as error:
        raise _refused(setup, f"{type(error).__name__}: {error}") from error


def _refused(setup: EngineSetup, why: str) -> PlanError:
    return PlanError(
        f"the model type {setup.model_config.model_type} does not compute the same where "
        f"context-parallel ranks spread its rows: {why}",
        fix="set parallel.context to 1",
    )


@contextmanager
def _whole_rows(engine: Any, setup: EngineSetup) -> Iterator[None]:
    """Context in which every rank computes whole rows by transformers' own attention."""
    model = getattr(engine.model, "module", engine.model)
    context, engine.context = engine.context, None
    own = model.config._attn_implementation
    model.set_attn_implementation(attention(setup.model_config.to_dict()))
    try:
        yield
    finally:
        model.set_attn_implementation(own)
        engine.context = context
