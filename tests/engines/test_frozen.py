"""Parameters that do not train: on every engine the run of plain transformers and torch with
`requires_grad_(False)`, and no gradient, optimizer state or moment of what is frozen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import LAYERS, TOLERANCE, assert_curves, megatron
from tests.engines.frozen_worker import STEPS, look
from tests.engines.parity_worker import Case, each_case, reference
from tests.forked import call_ranks

UNTIED = LAYERS | {"tie_word_embeddings": False}
PADDING = 256
"""Elements that an optimizer may add to its partitions."""

ATTENTION = ("*.self_attn.*", "*.post_attention_layernorm.weight")
"""In every layer, half of its tensors."""
BOTTOM = ("model.embed_tokens.*", "model.layers.[0-2].*")
"""All of the first of two pipeline stages."""
TOP = ("model.layers.[2-4].*", "model.norm.weight", "lm_head.weight")
"""All of the last of two pipeline stages."""

FROZEN: Mapping[tuple[str, ...], Any] = {
    ATTENTION: lambda name: "self_attn" in name or "post_attention" in name,
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


def fsdp(freeze: tuple[str, ...], **more: Any) -> Case:
    return frozen(Case("fsdp", 2, stage=3, **more), freeze)


FP32 = [
    frozen(Case("ddp", 2), ATTENTION),
    fsdp(ATTENTION),
    *(deepspeed(stage, ATTENTION) for stage in (1, 3)),
    frozen(megatron(tensor=2), ATTENTION),
    frozen(megatron(pipeline=2), BOTTOM),
    frozen(megatron(pipeline=2), TOP, family=UNTIED),
]
HALF_PRECISION = [
    deepspeed(1, ATTENTION, precision="bf16"),
    frozen(megatron(stage=1), ATTENTION, precision="bf16"),
    frozen(megatron(pipeline=2), BOTTOM, precision="fp16"),
    fsdp(BOTTOM, precision="bf16"),
    frozen(Case("ddp", 2), ATTENTION, precision="bf16"),
]
OFFLOADED = [deepspeed(3, BOTTOM, offload="cpu"), fsdp(BOTTOM, offload="cpu")]


@cache
def _reference(freeze: tuple[str, ...], family: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    return reference(family=dict(family), frozen=FROZEN[freeze])


def check(cases: Sequence[Case], folder: Path, tolerance: float) -> None:
    found = call_ranks(each_case, 2, partial(look, str(folder)), list(cases))
    for case in cases:
        print(case.name)
        ranks = [results[case.name] for results in found]
        expected = _reference(case.freeze, tuple(case.family.items()))
        assert_curves(ranks[0], expected, STEPS, tolerance)
        for rank in ranks:
            assert rank["gradients"] == 0
            assert abs(rank["moments"] - rank["trained"]) < PADDING
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
def test_fp32(tmp_path: Path) -> None:
    check(FP32, tmp_path, TOLERANCE)


@pytest.mark.slow
def test_16_bits(tmp_path: Path) -> None:
    check(HALF_PRECISION, tmp_path, 3e-2)


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_offload(tmp_path: Path) -> None:
    check(OFFLOADED, tmp_path, 1e-4)
