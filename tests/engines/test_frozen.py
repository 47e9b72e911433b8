"""Parameters that do not train: on every engine the run of plain transformers and torch with
`requires_grad_(False)`, and no gradient, optimizer state or moment of what is frozen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.reshaping import around, write_all
from tests.checkpoint.reshaping import check as check_reshape
from tests.engines.cases import LAYERS, TOLERANCE, assert_curves, megatron, zero
from tests.engines.frozen_worker import STEPS, look
from tests.engines.parity_worker import Case, each_case, reference
from tests.forked import call_ranks

UNTIED = LAYERS | {"tie_word_embeddings": False}
PADDING = 256
"""Elements that an optimizer may add to its partitions."""

ATTENTION = ("*.self_attn.*", "*.post_attention_layernorm.weight")
"""In every layer, half of its tensors."""
EMBEDDING = ("model.embed_tokens.*",)
BOTTOM = (*EMBEDDING, "model.layers.[0-2].*")
"""All of the first of two pipeline stages."""
TOP = ("model.layers.[2-4].*", "model.norm.weight", "lm_head.weight")
"""All of the last of two pipeline stages."""

FROZEN: Mapping[tuple[str, ...], Any] = {
    ATTENTION: lambda name: "self_attn" in name or "post_attention" in name,
    EMBEDDING: lambda name: "embed" in name,
    BOTTOM: lambda name: "embed" in name or _layer(name) in (0, 1, 2),
    TOP: lambda name: name[:10] in ("model.norm", "lm_head.we") or _layer(name) in (2, 3, 4),
}
"""What is frozen, as the reference has it: by name, without patterns."""


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


def frozen(case: Case, freeze: tuple[str, ...], **changes: Any) -> Case:
    return replace(case, freeze=freeze, **{"family": LAYERS, **changes})


def deepspeed(stage: int, freeze: tuple[str, ...], **more: Any) -> Case:
    return frozen(Case("deepspeed", 2, stage=stage, **more), freeze)


def fsdp(stage: int, freeze: tuple[str, ...], **more: Any) -> Case:
    return frozen(Case("fsdp", 2, stage=stage, **more), freeze)


HALF = [
    frozen(Case("ddp", 2), ATTENTION),
    fsdp(3, ATTENTION),
    *(deepspeed(stage, ATTENTION) for stage in (1, 2, 3)),
    frozen(megatron(tensor=2), ATTENTION),
    frozen(megatron(pipeline=2), ATTENTION),
]


WHOLE_STAGES = [
    frozen(megatron(pipeline=2), BOTTOM),
    frozen(megatron(pipeline=2), TOP, family=UNTIED),
]
HALF_PRECISION = [
    deepspeed(1, ATTENTION, precision="bf16"),
    frozen(megatron(stage=1), ATTENTION, precision="bf16"),
    frozen(megatron(pipeline=2), BOTTOM, precision="fp16"),
    fsdp(3, BOTTOM, precision="bf16"),
]


@cache
def _reference(
    freeze: tuple[str, ...], family: tuple[tuple[str, Any], ...], wide: bool
) -> dict[str, Any]:
    return reference(family=dict(family), wide=wide, frozen=FROZEN[freeze])


def check(cases: Sequence[Case], world: int, folder: Path, tolerance: float) -> None:
    found = call_ranks(each_case, world, partial(look, str(folder)), list(cases))
    for case in cases:
        print(case.name)
        ranks = [results[case.name] for results in found]
        expected = _reference(case.freeze, tuple(case.family.items()), case.wide)
        assert_curves(ranks[0], expected, STEPS, tolerance)
        for rank in ranks:
            assert rank["refused"] == "the loss is above 0.5"
            assert rank["optimizer_steps"] == STEPS
            assert rank["gradients"] == rank["grouped"] == 0
            whole = rank["moments"] * rank["shares"]
            swapped = case.offload == "nvme"
            assert swapped or abs(whole - rank["trained"]) < PADDING
            assert rank["away"] == swapped
            assert rank["buffers"] in (0, pytest.approx(rank["trained"], abs=PADDING))
        assert sum(rank["frozen"] for rank in ranks) > 2 * PADDING
        _check_saved(ranks[0]["checkpoint"], FROZEN[case.freeze])


def _check_saved(saved: Mapping[str, Any], is_frozen: Any) -> None:
    assert saved["problems"] == ()
    for name, quantities in saved["quantities"].items():
        moments = [] if is_frozen(name) else ["exp_avg", "exp_avg_sq"]
        assert quantities == ["weight", *moments], name
        assert saved["unchanged"][name] == is_frozen(name), name


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    check([*HALF, *WHOLE_STAGES], 2, tmp_path, TOLERANCE)


@pytest.mark.slow
def test_16_bits(tmp_path: Path) -> None:
    check(HALF_PRECISION, 2, tmp_path, 3e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_bf16_states(tmp_path: Path) -> None:
    cases = [deepspeed(3, BOTTOM, offload="cpu"), fsdp(3, BOTTOM, offload="cpu")]
    check(cases, 2, tmp_path, 1e-4)


@pytest.mark.soak
@pytest.mark.usefixtures("async_io")
def test_nvme(tmp_path: Path) -> None:
    """The embedding is large enough for DeepSpeed to move it to the disk."""
    swap = tmp_path / "swap"
    swap.mkdir()
    case = Case(
        "deepspeed", 2, stage=3, offload="nvme", nvme_path=str(swap), wide=True,
        freeze=EMBEDDING,
    )  # fmt: skip
    check([case], 2, tmp_path, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "freeze",
    [ATTENTION, pytest.param(BOTTOM, marks=pytest.mark.soak)],
    ids=["attention", "bottom"],
)
def test_reshape(freeze: tuple[str, ...], tmp_path: Path) -> None:
    """Saved in each layout, continued in another one with the same losses; the weights and
    moments that it saves again are the same to the bit."""
    layouts = {
        "pp2": (2, frozen(megatron(pipeline=2), freeze)),
        "zero2": (2, deepspeed(2, freeze)),
        "tp2": (2, frozen(megatron(tensor=2), freeze)),
        "fsdp3": (2, fsdp(3, freeze)),
        "zero3": (2, deepspeed(3, freeze)),
        "tp2-zero1": (4, frozen(zero(1), freeze)),
    }
    check_reshape(tmp_path, write_all(tmp_path, layouts), layouts, around(layouts))
