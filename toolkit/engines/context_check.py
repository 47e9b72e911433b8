"""Tests whether a model computes the same if context-parallel ranks spread its rows.

Attention of another kind than the registered one, positions that a model counts itself, a
state or a convolution along the row: each would be silently wrong. So the type of transformers'
model is not trusted: its log-probabilities are compared with those of whole rows by its own
attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from toolkit.batch import MicroBatch
from toolkit.engines.isolation import exchanged, probe
from toolkit.engines.setup import EngineSetup
from toolkit.errors import PlanError
from toolkit.models import compiled
from toolkit.models.families import attention

_EXACT, _ROUNDED = (1e-4, 1e-6), (0.1, 5e-4)
"""Largest difference in fp32, and in 16 bits or with fp8: relative to what the first half
of a row changes in the second, and, as a model may hardly attend, to the log-probabilities."""


def check_context(engine: Any, setup: EngineSetup) -> None:
    """Raise PlanError if the model depends on how its rows are split; collective."""
    tokens = probe(setup).input_ids.to(setup.ranks.device)
    batch = MicroBatch(tokens, tokens)
    with compiled.eager(), engine.evaluating():  # graphs exist for the trained shapes only
        split: Tensor = engine.log_probs(batch)
        with _whole_rows(engine, setup):
            whole, other = (engine.log_probs(one) for one in (batch, exchanged(batch)))
    half = tokens.shape[1] // 2
    seen = _size((other - whole)[:, half:])
    exact = setup.precision == "fp32" and setup.fp8 is None
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
