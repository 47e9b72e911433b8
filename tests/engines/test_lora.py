"""Adapters against PEFT in a plain loop: loss, gradient norm, and every tensor of every adapter
at the end. Every layout is in test_pairs.py; continuing in another one in
tests/checkpoint/test_reshape.py."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.engines.cases import LAYERS, MIXTRAL, TOLERANCE, assert_curves, megatron
from tests.engines.lora_worker import (
    adapter,
    dropped,
    exported_losses,
    look,
    reference,
)
from tests.engines.parity_worker import Case, each_case
from tests.forked import call_ranks
from toolkit.checkpoint import export_adapters
from toolkit.checkpoint.export import export
from toolkit.errors import CheckpointError
from toolkit.models.adapters.huggingface import peft_config

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
"""What PEFT reads."""

ALL = adapter()
EXPERTS = adapter(targets=["attention", "experts"], rank=8)
TARGETS: dict[str, Any] = {
    "all-linear": "all-linear",
    str(EXPERTS["targets"]): ["q_proj", "k_proj", "v_proj", "o_proj"],
}
"""What a recipe says, in PEFT's words."""


def adapted(case: Case, adapter: dict[str, Any] = ALL, **changes: Any) -> Case:
    return replace(case, adapter=adapter, **{"family": case.family or LAYERS, **changes})


LINEAR = [
    adapted(Case("deepspeed", 2, stage=3)),
    adapted(megatron(tensor=2, sequence=True)),
    adapted(megatron(pipeline=2)),
]
OF_EXPERTS = [
    adapted(case, EXPERTS, family=MIXTRAL)
    for case in (
        Case("fsdp", 2, stage=3),
        replace(megatron(expert=2), kernels={"experts": "grouped"}),
        replace(megatron(tensor=2, sequence=True), kernels={"experts": "sequential"}),
    )
]
HALF_PRECISION = [
    adapted(megatron(tensor=2, sequence=True), precision="bf16"),
    adapted(Case("deepspeed", 2, stage=1), precision="bf16"),
    adapted(Case("fsdp", 2, stage=3), precision="bf16"),
    adapted(Case("ddp", 2), precision="bf16"),
    adapted(megatron(pipeline=2), precision="fp16"),
    adapted(megatron(expert=2, stage=1), EXPERTS, family=MIXTRAL, precision="bf16"),
]


@cache
def _reference(
    family: tuple[tuple[str, Any], ...], targets: str, rank: int, rslora: bool
) -> Any:
    case = Case("ddp", 8, family=dict(family))
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    return reference(
        case,
        r=rank,
        target_modules=TARGETS[targets],
        target_parameters=experts if "experts" in targets else None,
        use_rslora=rslora,
        fan_in_fan_out=case.family.get("model_type") == "gpt2",
    )


def expected(case: Case) -> Any:
    wanted = case.adapter
    assert wanted is not None
    family = tuple(case.family.items())
    targets, rslora = str(wanted["targets"]), wanted.get("rslora", False)
    return _reference(family, targets, wanted["rank"], rslora)


def check(
    cases: Sequence[Case], world: int, folder: Path, tolerance: float = TOLERANCE
) -> dict[str, Any]:
    results = call_ranks(each_case, world, partial(look, str(folder)), list(cases))[0]
    for case in cases:
        print(case.name)
        assert_equals(results[case.name], expected(case), tolerance)
    return results


def assert_equals(found: Any, wanted: Any, tolerance: float) -> None:
    assert_curves(found, wanted, tolerance=tolerance)
    assert found["tensors"].keys() == wanted["tensors"].keys()
    for name, tensor in wanted["tensors"].items():
        assert found["tensors"][name].shape == tensor.shape
        difference = (found["tensors"][name] - tensor).abs()
        # AdamW makes a part of a step (1e-3) of a gradient that is rounding errors alone.
        assert difference.mean() <= tolerance / 10 and difference.max() <= 20 * tolerance, name


@pytest.mark.slow
def test_16_bits(tmp_path: Path) -> None:
    check(HALF_PRECISION, 2, tmp_path, 3e-2)


@pytest.mark.slow
def test_exports(tmp_path: Path) -> None:
    """What is exported, for PEFT and merged, has the engine's loss."""
    results = check(LINEAR + OF_EXPERTS, 2, tmp_path)
    for number, case in enumerate(LINEAR + OF_EXPERTS[1:2]):
        result = results[case.name]
        losses = exported_losses(case, result["end"], tmp_path / str(number))
        assert losses == pytest.approx([result["validation"]] * 2, rel=TOLERANCE)
    assert_lost_adapters_are_refused(result["end"], tmp_path)


def assert_lost_adapters_are_refused(checkpoint: Path, folder: Path) -> None:
    """A folder in which PEFT would not find those of experts."""

    def written(lora: Any, base: Any) -> Any:
        config = peft_config(lora, base)
        config.target_parameters = None
        return config

    change = patch.object(export_adapters, "peft_config", written)
    with change, pytest.raises(CheckpointError, match=r"PEFT expects .* None, the file"):
        export(checkpoint, folder / "lost")
    assert not (folder / "lost").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [True, False])
def test_dropout_leaves_factors_equal_on_tensor_ranks(sequence: bool) -> None:
    """Ranks with the same inputs drop the same of them, and recompute drops them again."""
    case = adapted(megatron(tensor=2, sequence=sequence), adapter(dropout=0.3))
    again = replace(case, recompute="full")
    ranks = call_ranks(each_case, 2, dropped, [case, again])
    one, other = (rank[case.name] for rank in ranks)
    assert len(one["whole"]) == 5 * 4
    for name, factor in one["whole"].items():
        assert factor.equal(other["whole"][name]), name
    assert ranks[0][again.name]["loss"] == pytest.approx(one["loss"], rel=TOLERANCE)
    assert one["loss"][0] != pytest.approx(expected(case)["loss"][0], rel=TOLERANCE)
