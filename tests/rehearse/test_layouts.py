"""Which layouts are tried: the recipe's own first, scaled down, and every engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe, ZeroSection
from toolkit.rehearse.layouts import STANDARD, candidates, own_layout, select
from toolkit.rehearse.rehearsal import Options, _assignment, prepare

TINY = ROOT / "recipes/tiny/llama-bytes.yaml"
INTERLEAVED = [
    "parallel.engine=megatron", "parallel.pipeline=3", "parallel.virtual_pipeline=2",
    "model.config.num_hidden_layers=6", "training.global_batch_size=24",
    "parallel.zero.stage=auto", "cluster.gpus_per_node=3",
]  # fmt: skip


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(TINY)


def planned(recipe: Recipe, engine: str = "megatron", **layout: Any) -> Plan:
    """A plan with a layout of the test's own."""
    model: Any = "hf" if engine == "ddp" else "megatron"
    changed: Any = {"engine": engine, "model": model, "layout": Layout(**layout)}
    return replace(plan_recipe(recipe), **changed)


def test_nothing_is_left_to_the_planner() -> None:
    for one in STANDARD:
        section = one.parallel.model_dump()
        assert "auto" not in section.values(), one.name
        assert section["zero"]["stage"] != "auto", one.name


def test_own_layout_that_is_a_standard_one_comes_first_under_its_name(recipe: Recipe) -> None:
    found = candidates(recipe, plan_recipe(recipe), 4)
    assert [one.name for one in found[:2]] == ["zero2", "ddp"]
    assert len(found) == len(STANDARD)
    assert [one.name for one in select(found, ["recipe"])] == ["zero2"]


def test_own_layout_of_its_own_comes_first_as_recipe(recipe: Recipe) -> None:
    found = candidates(recipe, planned(recipe, tp=2, recompute=6), 4)
    assert (found[0].name, found[0].note) == ("recipe", "")
    assert found[0].parallel.recompute == 1, "its model has fewer layers"
    assert len(found) == len(STANDARD) + 1


@pytest.mark.parametrize(
    ("layout", "processes", "expected", "note"),
    [
        ({"tp": 8, "pp": 16, "dp": 8}, 4, (2, 2, 1, 1, 1),
         "tp8 pp16 dp8 scaled down to tp2 pp2"),
        ({"tp": 3, "dp": 9}, 6, (3, 1, 1, 1, 2), "tp3 dp9 scaled down to tp3 dp2"),
        ({"tp": 8, "pp": 4, "ep": 8, "dp": 16}, 4, (2, 1, 1, 2, 2),
         "tp8 pp4 ep8 dp16 scaled down to tp2 ep2 dp2"),
        ({"pp": 4, "vpp": 3}, 1, (1, 1, 1, 1, 1), "pp4 vpp3 scaled down to one process"),
        ({"tp": 2}, 4, (2, 1, 1, 1, 1), ""),
    ],
)  # fmt: skip
def test_own_layout_is_scaled_down(
    recipe: Recipe,
    layout: dict[str, Any],
    processes: int,
    expected: tuple[int, ...],
    note: str,
) -> None:
    found = own_layout(ZeroSection(), planned(recipe, **layout), processes)
    section = found.parallel
    assert expected[:4] == (
        section.tensor, section.pipeline, section.virtual_pipeline, section.expert,
    )  # fmt: skip
    assert found.processes == expected[0] * expected[1] * expected[4] <= processes
    assert found.note == note


def test_own_layout_keeps_sharding_and_files(recipe: Recipe) -> None:
    zero = ZeroSection(config="zeropp", nvme_path="/scratch")
    plan = planned(
        recipe, "deepspeed", dp=8, zero_stage=3, offload_optimizer="nvme", recompute="full"
    )
    section = own_layout(zero, plan, 4).parallel
    assert (section.zero.stage, section.zero.offload_optimizer) == (3, "nvme")
    assert (section.zero.config, section.zero.nvme_path) == ("zeropp", "/scratch")
    assert section.recompute == "full"


def test_three_interleaved_stages_are_not_skipped(tmp_path: Path) -> None:
    """The batch suits every layout: six micro batches of two for three interleaved stages."""
    rehearsal = prepare(load_recipe(TINY, INTERLEAVED), Options())
    own = rehearsal.layouts[0]
    assert (own.parallel.pipeline, own.parallel.virtual_pipeline) == (3, 2)
    assert own.note == ""
    for one in rehearsal.layouts:
        if one.parallel.expert == 1:  # llama has no experts
            assignment = _assignment(rehearsal.recipe, one.parallel, one.processes, tmp_path)
            layout = assignment.plan.layout
            assert layout.global_batch == 12
            assert layout.vpp == 1 or layout.gradient_accumulation % layout.pp == 0


def test_globs_choose_in_the_order_of_the_list(recipe: Recipe) -> None:
    found = candidates(recipe, plan_recipe(recipe), 4)
    assert [one.name for one in select(found, ["zero[13]", "ddp"])] == ["ddp", "zero1", "zero3"]
    assert select(found, []) == found
