"""Every layout with every feature against plain transformers, PEFT and torch in one process.

Masks are uneven across ranks and micro batches, so any mean of means would differ in the first
digits. What one feature does by itself, and what an engine keeps, is in the other files.
"""

from collections.abc import Sequence
from itertools import groupby

import pytest

from tests.engines.pairs import (
    LAYOUTS,
    SIX_LAYERS,
    VALUES,
    Case,
    compared,
    covering,
    covering_array,
    in_16_bits,
    records,
)
from tests.forked import call_ranks

TWO = {
    "ddp": ["ddp", "ddp-cp2"],
    "zero": ["zero3", "zero2", "zero3-cp2", "zero1", "zero0", "zero2-cp2"],
    "fsdp": ["fsdp3", "fsdp2", "fsdp3-cp2", "fsdp1"],
    "megatron": [
        "megatron-tp2",
        "megatron-tp2-sp",
        "megatron-pp2",
        "megatron-pp2-vpp2",
        "megatron-dp2-distopt",
        "megatron-cp2",
        "megatron-dp2",
        "megatron-tp2-zero0-dp1",
    ],
    "experts": ["megatron-ep2", "megatron-cp2-ep2", "megatron-ep2-distopt"],
}
"""Layouts of two processes that share the features, each of which one of them meets."""
FOUR = {
    "in DeepSpeed": [
        *(f"megatron-tp2-zero{stage}" for stage in (0, 1, 2, 3)),
        "megatron-tp2-cp2-zero3",
    ],
    "in pipelines": [
        "megatron-tp2-pp2-sp",
        "megatron-pp2-cp2-distopt",
        "megatron-tp2-cp2-sp",
        "megatron-pp2-distopt",
        "megatron-tp4",
    ],
    "of experts": ["megatron-tp2-ep2", "megatron-dp4-ep2-distopt"],
    "of transformers": ["fsdp3-replicated"],
}
"""Layouts that need four; theirs by twos are among `TWO`, so each has one case."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]


def check(cases: Sequence[Case]) -> None:
    wrong = []
    for world, group in groupby(cases, key=lambda case: case.world):
        together = [*group]
        found = call_ranks(records, world, together)[0]
        for case, record in zip(together, found, strict=True):
            comparison = compared(case, record)
            far = f"{comparison.max_rel_loss:.0e} {comparison.max_rel_grad_norm:.0e}"
            print(f"{far}  {case}")
            if comparison.verdict not in ("exact", "within"):
                wrong.append(f"{case}: {comparison.first}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.parametrize("layouts", TWO.values(), ids=TWO)
def test_two_processes(layouts: list[str]) -> None:
    check(covering_array(layouts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "some",
    # Quick, too: on two processes, no two ranks hold the same experts, or the same shard.
    [pytest.param(one, marks=[pytest.mark.quick] * one.startswith("of ")) for one in FOUR],
)
def test_four_processes(some: str) -> None:
    check(covering_array(FOUR[some], len(FOUR[some])))


@pytest.mark.slow
def test_eager_attention_to_joined_documents() -> None:
    """The other cases have it with documents apart, which are a mask's."""
    eager = (("attention", "eager"), ("documents", "joined"))
    check([Case(layout, eager) for layout in ("fsdp3", "megatron-tp2")])


@pytest.mark.slow
def test_frozen_weights_in_16_bits() -> None:
    """Held in these 16 bits alone, without an fp32 master, with adapters and without."""
    bottom, adapter = ("frozen", "bottom"), ("adapter", "all")
    some = {
        "ddp": bottom, "zero1": adapter, "fsdp3": adapter, "megatron-dp2-distopt": bottom,
        "megatron-pp2": adapter,
    }  # fmt: skip
    cases = [Case(layout, (("model", "untied"), one), "bf16") for layout, one in some.items()]
    experts = ("model", "mixtral"), ("adapter", "experts")
    check([*cases, Case("megatron-ep2-distopt", experts, "bf16")])


@pytest.mark.slow
@pytest.mark.quick
def test_fp32_masters_in_16_bits() -> None:
    untied = (("model", "untied"),)
    check([Case(layout, untied, "bf16") for layout in ("ddp", "zero2", "zero3", "fsdp3")])


def test_every_feature_is_legal_somewhere() -> None:
    """Or no layout would have met it, and no layout is forgotten."""
    cases = [case for layouts in TWO.values() for case in covering_array(layouts)]
    assert {value for case in cases for value in case.values} == {*VALUES, SIX_LAYERS}
    tried = {case.layout for case in cases} | {one for some in FOUR.values() for one in some}
    assert {name for name in LAYOUTS if "offload" not in name} == tried


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_feature(layout: str, request: pytest.FixtureRequest) -> None:
    if "offload" in layout:
        request.getfixturevalue("cpu_adam")
    check([*covering([layout])])


@pytest.mark.soak
@pytest.mark.parametrize("layouts", TWO.values(), ids=TWO)
def test_16_bits(layouts: list[str]) -> None:
    check([case for layout in layouts for case in in_16_bits(layout)])
