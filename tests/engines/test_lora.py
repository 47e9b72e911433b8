"""Adapters on every engine against PEFT in a plain loop: loss, gradient norm, and every tensor
of every adapter at the end."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.engines.cases import LAYERS, MIXTRAL, TOLERANCE, megatron
from tests.engines.lora_worker import (
    STEPS,
    adapter,
    dropped,
    exported_losses,
    look,
    reference,
    unmarked,
)
from tests.engines.parity_worker import Case, each_case
from tests.forked import call_ranks
from tests.models.configs import config_of
from toolkit.adapters.huggingface import peft_config
from toolkit.checkpoint import export_adapters
from toolkit.checkpoint.export import export
from toolkit.checkpoint.saved_state import SavedState
from toolkit.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
"""What PEFT reads."""

ALL = adapter()
ATTENTION = adapter(targets="attention", rslora=True)
EXPERTS = adapter(targets=["attention", "experts"], rank=8)
SOME = adapter(targets=["v_proj", "up_proj"])
"""A part of each of megatron-core's fused layers."""
TARGETS: dict[str, Any] = {
    "all-linear": "all-linear",
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    str(SOME["targets"]): SOME["targets"],
    str(EXPERTS["targets"]): ["q_proj", "k_proj", "v_proj", "o_proj"],
}
"""What a recipe says, in PEFT's words."""


def adapted(case: Case, adapter: dict[str, Any] = ALL, **changes: Any) -> Case:
    return replace(case, adapter=adapter, **{"family": case.family or LAYERS, **changes})


def deepspeed(stage: int, **more: Any) -> Case:
    return Case("deepspeed", 2, stage=stage, **more)


FEW = [
    adapted(Case("ddp", 2)),
    adapted(deepspeed(3)),
    adapted(megatron(tensor=2, sequence=True)),
    adapted(megatron(pipeline=2)),
]
PARTS = [
    adapted(deepspeed(2), ATTENTION),
    adapted(megatron(tensor=2, sequence=True), SOME),
    adapted(megatron(expert=2, family=MIXTRAL), ATTENTION),
    adapted(megatron(tensor=2, sequence=True, family=config_of("gpt2"))),
]
OF_EXPERTS = [
    adapted(case, EXPERTS, family=MIXTRAL)
    for case in (
        Case("ddp", 2),
        deepspeed(3, recompute="full"),
        Case("fsdp", 2, stage=3),
        replace(megatron(expert=2), kernels={"experts": "grouped"}),
        replace(megatron(tensor=2, sequence=True), kernels={"experts": "sequential"}),
        replace(megatron(tensor=2, sequence=True), kernels={"experts": "grouped"}),
    )
]
HALF_PRECISION = [
    adapted(megatron(tensor=2, sequence=True), precision="bf16"),
    adapted(deepspeed(1), precision="bf16"),
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
    """Of a run, or of its end, the numbers of the reference."""
    for quantity in ("loss", "grad_norm"):
        last = wanted[quantity][-len(found[quantity]) :]
        assert found[quantity] == pytest.approx(last, rel=tolerance)
    assert found["tensors"].keys() == wanted["tensors"].keys()
    for name, tensor in wanted["tensors"].items():
        assert found["tensors"][name].shape == tensor.shape
        difference = (found["tensors"][name] - tensor).abs()
        # AdamW makes a part of a step (1e-3) of a gradient that is rounding errors alone.
        assert difference.mean() <= tolerance / 10 and difference.max() <= 20 * tolerance, name


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FEW, PARTS, OF_EXPERTS], ids=["few", "parts", "experts"])
def test_two_processes(cases: list[Case], tmp_path: Path) -> None:
    check(cases, 2, tmp_path)


@pytest.mark.slow
def test_16_bits(tmp_path: Path) -> None:
    check(HALF_PRECISION, 2, tmp_path, 3e-2)


@pytest.mark.slow
def test_an_unsummed_factor_is_seen(tmp_path: Path) -> None:
    """Sequence parallel without the mark of the whole factors: the first loss is right."""
    case = adapted(megatron(tensor=2, sequence=True))
    found = call_ranks(each_case, 2, partial(unmarked, str(tmp_path)), [case])[0][case.name]
    wanted = expected(case)
    assert found["loss"][0] == pytest.approx(wanted["loss"][0], rel=TOLERANCE)
    assert found["grad_norm"][0] != pytest.approx(wanted["grad_norm"][0], rel=0.01)


@pytest.mark.slow
def test_continued_in_the_same_layout_to_the_bit(tmp_path: Path) -> None:
    cases = [adapted(deepspeed(3)), FEW[2]]
    first = check(cases, 2, tmp_path)
    again = [replace(case, resume_in=str(first[case.name]["half"])) for case in cases]
    for before, after in zip(cases, check(again, 2, tmp_path / "again").items(), strict=True):
        unbroken, (_, resumed) = first[before.name], after
        assert resumed["loss"] == unbroken["loss"][STEPS // 2 :]
        assert resumed["grad_norm"] == unbroken["grad_norm"][STEPS // 2 :]
        for name, tensor in unbroken["tensors"].items():
            assert tensor.equal(resumed["tensors"][name]), name


@pytest.mark.slow
def test_continued_in_another_layout(tmp_path: Path) -> None:
    """Each layout's checkpoint of half the run, continued in the next one to the same end; what
    is exported then, for PEFT and merged, has the loss that the engine has."""
    cases = [*FEW[1:], adapted(Case("fsdp", 2, stage=3))]
    first = check(cases, 2, tmp_path)
    halves = [str(first[case.name]["half"]) for case in cases]
    others = [*cases[1:], cases[0]]
    moved = [replace(a, resume_in=half) for a, half in zip(others, halves, strict=True)]
    results = check(moved, 2, tmp_path / "moved")
    for index, case in enumerate(moved):
        result = results[case.name]
        assert len(result["loss"]) == STEPS // 2
        losses = exported_losses(case, result["end"], tmp_path / str(index))
        assert losses == pytest.approx([result["validation"]] * 2, rel=TOLERANCE)


@pytest.mark.slow
def test_adapters_of_experts_in_another_layout(tmp_path: Path) -> None:
    """The same of experts, whose columns of B lie apart: on ranks that each have two experts, a
    half of each, and rows of all."""
    fsdp, expert, _, tensor = OF_EXPERTS[2:]
    cases = [fsdp, expert, tensor]
    first = check(cases, 2, tmp_path)
    others = [expert, tensor, fsdp]
    moved = [
        replace(other, resume_in=str(first[case.name]["half"]))
        for case, other in zip(cases, others, strict=True)
    ]
    results = check(moved, 2, tmp_path / "moved")
    result = results[moved[0].name]
    losses = exported_losses(moved[0], result["end"], tmp_path / "exported")
    assert losses == pytest.approx([result["validation"]] * 2, rel=TOLERANCE)
    assert_lost_adapters_are_refused(result["end"], tmp_path)


def assert_lost_adapters_are_refused(checkpoint: Path, folder: Path) -> None:
    """A folder in which PEFT would not find those of experts, and one that changes nothing."""

    def written(lora: Any, base: Any) -> Any:
        config = peft_config(lora, base)
        config.target_parameters = None
        return config

    def nothing(_: Any, quantity: str, tensor: str) -> Iterator[Any]:
        for piece in in_pieces(SavedState(checkpoint), quantity, tensor):
            yield 0 * piece

    for change, told in (
        (
            patch.object(export_adapters, "peft_config", written),
            "PEFT expects .* None, the file",
        ),
        (patch.object(SavedState, "in_pieces", nothing), "every B is 0"),
    ):
        with change, pytest.raises(CheckpointError, match=told):
            export(checkpoint, folder / "lost")
        assert not (folder / "lost").exists()


in_pieces = SavedState.in_pieces


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
