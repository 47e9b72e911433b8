"""What every rank of test_isolation.py does: look for leaks, and train packed rows."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from tests.engines.parity_worker import (
    GLOBAL_BATCH,
    LENGTH,
    SEED,
    VOCABULARY,
    Case,
    clipped,
    curves,
    global_batches,
    micro_batches,
    new_engine,
    recipe,
    reference_model,
    unmasked,
)
from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.engines.base import Engine
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks
from toolkit.engines.isolation import exchanged
from toolkit.engines.setup import EngineSetup
from toolkit.errors import PlanError
from toolkit.models import huggingface as hf
from toolkit.models.context import Context
from toolkit.plan.planner import plan_recipe

STEPS = 3


def segments_of(ends: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Segments and positions of rows whose documents end there."""
    segments = torch.zeros(len(ends), LENGTH, dtype=torch.int32)
    positions = torch.arange(LENGTH).repeat(len(ends), 1)
    for row, places in enumerate(ends):
        for end in places[:-1]:
            segments[row, end:] += 1
            positions[row, end:] = torch.arange(LENGTH - end)
    return segments, positions


def documents(step: int) -> list[list[int]]:
    """Where the documents of a global batch end: one to four in a row."""
    generator = torch.Generator().manual_seed(step)
    ends = []
    for row in range(GLOBAL_BATCH):
        inner = torch.randperm(LENGTH - 1, generator=generator)[: row % 4] + 1
        ends.append([*sorted(inner.tolist()), LENGTH])
    return ends


def leaks(engine: Engine, stages: int) -> list[bool]:
    """Whether a bit of the last documents of two rows changes when the first ones are
    exchanged: with segments, and without."""
    half = LENGTH // 2
    segments, positions = segments_of([[half, LENGTH]] * 2)
    inputs = next(global_batches(1))[0][:2]
    labels = inputs.clone()
    labels[:, :half] = IGNORE_INDEX
    batch = MicroBatch(inputs, labels, positions=positions, segments=segments)
    found = []
    for one in (batch, replace(batch, segments=None)):
        rows = (engine.sequence_log_probs([x] * stages) for x in (one, exchanged(one)))
        found.append(not torch.equal(*rows))
    return found


def train(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Leaks, then loss and gradient norm of a few packed steps."""
    engine, layout = new_engine(case, ranks, SEED)
    found = leaks(engine, layout.pp)
    results = []
    for step, (inputs, labels) in enumerate(global_batches(STEPS)):
        segments, positions = segments_of(documents(step))
        batches = micro_batches(
            inputs, labels, ranks, layout, segments=segments, positions=positions
        )
        results.append(engine.train_step(batches, unmasked(labels), 1e-3))
    engine.close()
    return {"leaks": found, **curves(results)}


def separate_documents(family: dict[str, Any]) -> dict[str, list[float]]:
    """Plain transformers, each document in a forward pass of its own."""
    model, optimizer = reference_model(Case("ddp", GLOBAL_BATCH, family=family))
    losses, norms = [], []
    for step, (inputs, labels) in enumerate(global_batches(STEPS)):
        loss = sum(
            cross_entropy(
                model(inputs[row : row + 1, start:end]).logits[0], labels[row, start:end],
                ignore_index=IGNORE_INDEX, reduction="sum",
            )
            for row, start, end in spans(documents(step))
        ) / unmasked(labels)  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        norms.append(clipped(model))
        optimizer.step()
        losses.append(loss.item())
    return {"loss": losses, "grad_norm": norms}


def spans(ends: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """Row, first token and end of each document."""
    for row, places in enumerate(ends):
        yield from ((row, start, end) for start, end in zip([0, *places], places, strict=False))


RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
"""Models in which something runs along the row besides attention: a state, a convolution."""


class OwnWeights:
    """The weights that a transformers model was initialised with."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._values = {name: p.detach().flatten() for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self._values[name][start:stop]


def context_refusals(ranks: Ranks) -> dict[str, str]:
    """What context parallel is refused with, by type: also where positions are lost."""
    spread = Case("ddp", 2, parallel={"context": 2})
    found = {one: refusal(one, ranks, spread) for one in ("qwen3", *RECURRENT, "bloom")}
    part = Context.part
    with patch.object(Context, "part", lambda *rows: replace(part(*rows), positions=None)):
        return found | {"llama": refusal("llama", ranks, spread)}


def refusal(model_type: str, ranks: Ranks, case: Case) -> str:
    """What building an engine of this type for the case is refused with."""
    wanted = recipe(case, ranks.world)
    small = {
        "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY,
        "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **small, **RECURRENT.get(model_type, {}))
    config._experts_implementation = "eager"
    torch.manual_seed(SEED)
    weights: Any = OwnWeights(hf.new_model(config, torch.float32))
    plan = plan_recipe(wanted)
    setup = EngineSetup.of(wanted, plan, {}, ranks, config, weights)
    try:
        build_engine("ddp", setup).close()
    except PlanError as error:
        return str(error)
    return "accepted"
