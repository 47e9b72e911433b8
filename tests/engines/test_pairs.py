"""Every layout with every feature against plain transformers, PEFT and torch in one process.

Masks are uneven across ranks and micro batches, so any mean of means would differ in the first
digits. What one feature does by itself, and what an engine keeps, is in the other files.
"""

from collections.abc import Sequence
from itertools import groupby

import pytest

from tests.engines.pairs import (
    LAYOUTS,
    VALUES,
    Case,
    compared,
    covering,
    in_16_bits,
    records,
    whole_product,
)
from tests.forked import call_ranks

TWO = [name for name, (world, _) in LAYOUTS.items() if world == 2]
SHARED = {
    "zero": ["zero2", "zero0", "zero1"],
    "fsdp": ["fsdp2", "fsdp1"],
    "megatron tp2": ["megatron-tp2", "megatron-tp2-sp"],
    "megatron cp2": ["megatron-cp2", "megatron-cp2-ep2"],
    "cp2": ["ddp-cp2", "zero2-cp2", "zero3-cp2", "fsdp3-cp2"],
}
"""Layouts that share the features."""
SOAK = ("zero2-offload", "fsdp3-offload")
"""Only among all layouts of `make soak`: they differ from others in where the optimizer is."""
QUICK = ("zero3", "fsdp3", "megatron-pp2", "megatron-ep2")
"""In `make test`."""
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
"""Layouts of four processes that share the features: theirs by twos are among `TWO`."""

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
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(one, marks=pytest.mark.quick) if one in QUICK else one
        for one in [*TWO, *SHARED]
        if not any(one in shared for shared in [*SHARED.values(), SOAK])
    ],
)
def test_two_processes(layout: str, request: pytest.FixtureRequest) -> None:
    if "offload" in layout:
        request.getfixturevalue("cpu_adam")
    check([*covering(SHARED.get(layout, [layout]))])


@pytest.mark.slow
@pytest.mark.parametrize("layouts", FOUR.values(), ids=FOUR)
def test_four_processes(layouts: list[str]) -> None:
    check([*covering(layouts)])


def test_every_feature_is_legal_somewhere() -> None:
    """Or no layout would have met it."""
    met = {
        value
        for layout in (*QUICK, "ddp-cp2", "megatron-pp2-vpp2")
        for case in covering([layout])
        for value in case.values
    }
    assert met - {("model", "six layers")} == set(VALUES)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_whole_product(layout: str) -> None:
    check([*whole_product(layout)])


@pytest.mark.soak
@pytest.mark.parametrize("layout", TWO)
def test_16_bits(layout: str) -> None:
    check([*in_16_bits(layout)])
