"""What does not train has no gradient, gradient buffer, optimizer state or moments in a
checkpoint, on any engine. That its runs are plain transformers' is in test_pairs.py.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engines.cases import (
    LAYERS,
    Case,
    each_case,
    megatron,
    new_engine,
    plain_model,
    steps,
    write_state,
)
from tests.forked import call_ranks
from toolkit.checkpoint.export import DTYPES
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_quantity
from toolkit.checkpoint.store import folder_name
from toolkit.checkpoint.verify import verify
from toolkit.engines.distributed import Ranks

STEPS = 2
PADDING = 256
"""Elements that an optimizer may add to its partitions."""
ATTENTION = ("*.self_attn.*", "*.post_attention_layernorm.weight")
"""In every layer, half of its tensors."""
BOTTOM = ("model.embed_tokens.*", "model.layers.[0-2].*")
"""All of the first of two pipeline stages."""
TOP = ("model.layers.[2-4].*", "model.norm.weight", "lm_head.weight")
"""All of the last of two pipeline stages."""

FROZEN = {
    ATTENTION: r".*(self_attn|post_attention)",
    BOTTOM: r"model\.embed|model\.layers\.[012]\.",
    TOP: r"model\.norm|lm_head|model\.layers\.[234]\.",
}
"""The same without the product's patterns."""


def frozen(freeze: tuple[str, ...], case: Case, **changes: Any) -> Case:
    return replace(case, freeze=freeze, **{"family": LAYERS, **changes})


CASES = [
    frozen(ATTENTION, Case("ddp", 2), precision="bf16"),
    frozen(BOTTOM, Case("fsdp", 2, stage=3), precision="bf16"),
    frozen(ATTENTION, Case("deepspeed", 2, stage=1), precision="bf16"),
    frozen(ATTENTION, Case("deepspeed", 2, stage=3)),
    frozen(BOTTOM, Case("deepspeed", 2, stage=3, offload="cpu")),
    frozen(BOTTOM, Case("fsdp", 2, stage=3, offload="cpu")),
    frozen(ATTENTION, megatron(stage=1), precision="bf16"),
    frozen(BOTTOM, megatron(pipeline=2), precision="fp16"),
    frozen(TOP, megatron(pipeline=2), family=LAYERS | {"tie_word_embeddings": False}),
]


def look(folder: str, case: Case, ranks: Ranks) -> dict[str, Any]:
    """Train; what is held for the parameters of this rank."""
    engine, layout = new_engine(case, ranks)
    steps(engine, layout, ranks, 0, STEPS)
    parameters = list(parameters_of(engine))
    trained = sum(numel_of(p) for p in parameters if p.requires_grad)
    moments = sum(
        local(state["exp_avg"]).numel()
        for adam in adams_of(engine)
        for state in adam.state.values()
    )
    write_state(case, ranks, engine, STEPS, Path(folder) / case.name)
    result = {
        "gradients": sum(p.grad is not None for p in parameters if not p.requires_grad),
        "trained": trained,
        "frozen": sum(numel_of(p) for p in parameters) - trained,
        "moments": moments * shares_of(case, ranks.world),
        "buffers": sum(buffer.grad_data.numel() for buffer in buffers_of(engine)),
    }
    engine.close()
    return result


def shares_of(case: Case, world: int) -> int:
    """Ranks that the optimizer states of one model-parallel rank are spread over."""
    spread = case.engine != "ddp" and case.stage not in (0, "auto")
    degrees = (case.parallel.get(name, 1) for name in ("tensor", "pipeline"))
    return world // prod(degrees) if spread else 1


def parameters_of(engine: Any) -> Iterator[nn.Parameter]:
    """The parameters of this rank's part of the model."""
    if hasattr(engine, "shards"):  # FSDP2
        yield from engine.shards.values()
        return
    modules = getattr(engine, "chunks", None) or [getattr(engine.model, "module", engine.model)]
    for module in modules:
        yield from module.parameters()


def numel_of(parameter: Any) -> int:
    """Elements of the whole parameter."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def adams_of(engine: Any) -> Iterator[Any]:
    """torch's or DeepSpeed's own AdamWs, without what is around them."""
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    yield from filter(None, (getattr(part, "optimizer", part) for part in parts))


def local(tensor: Any) -> torch.Tensor:
    """This rank's rows of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def buffers_of(engine: Any) -> Iterator[Any]:
    """megatron-core's gradient buffers."""
    for replica in getattr(engine, "replicas", ()):
        yield from (*replica.buffers, *replica.expert_parallel_buffers)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_engines(tmp_path: Path) -> None:
    found = call_ranks(each_case, 2, partial(look, str(tmp_path)), CASES)
    for case in CASES:
        ranks = [results[case.name] for results in found]
        for rank in ranks:
            assert rank["gradients"] == 0
            assert abs(rank["moments"] - rank["trained"]) < PADDING
            assert rank["buffers"] in (0, pytest.approx(rank["trained"], abs=PADDING))
        assert sum(rank["frozen"] for rank in ranks) > 2 * PADDING
        check_saved(case, tmp_path / case.name / folder_name(STEPS))


def check_saved(case: Case, checkpoint: Path) -> None:
    """No moments of what is frozen, and its weights as they were, in the training precision."""
    assert verify(checkpoint).problems == ()
    state, first = SavedState(checkpoint), dict(plain_model(case).named_parameters())
    for name, shape in state.shapes.items():
        still = re.match(FROZEN[case.freeze], name) is not None
        moments = [] if still else ["exp_avg", "exp_avg_sq"]
        assert state.quantities(name) == ["weight", *moments], name
        weight = state.read("weight", whole_quantity("weight", name, shape))
        rounded = first[name].detach().to(DTYPES.get(case.precision, torch.float32)).float()
        assert torch.equal(weight, rounded) == still, name
