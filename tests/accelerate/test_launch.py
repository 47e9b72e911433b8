"""`accelerate launch --config_file` really starts what the files say."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.accelerate.conftest import STEPS
from tests.accelerate.launched import common, launch
from tests.accelerate.layouts import LAYOUTS
from tests.e2e.conftest import Project
from tests.e2e.product import Ended, curve, dmt, run, settings, tool
from tests.processes import ROOT
from toolkit.foreign.accelerate_file import COMMON

pytestmark = pytest.mark.slow

WORKER = ROOT / "launch" / "train.py"
LOOP = ROOT / "launch" / "examples" / "accelerate_loop.py"
TRAINER = ROOT / "launch" / "examples" / "hf_trainer.py"
CHANGES: dict[str, dict[str, object]] = {
    name: {f"parallel.{key}": value for key, value in layout.items()}
    for name, layout in {
        **{name: LAYOUTS[name] for name in ("ddp", "zero1", "zero2", "zero3")},
        "zero2_offload": LAYOUTS["zero2 offload"],
        "zero3_offload": {
            **LAYOUTS["zero3"],
            "zero.offload_optimizer": "cpu",
            "zero.offload_parameters": "cpu",
        },
        "fsdp2": {"engine": "fsdp", "zero.stage": 3},
    }.items()
}
"""What a recipe must say to run on what a common file starts."""
SAME = {"zero2_offload": 1e-4, "zero3_offload": 1e-4}
"""Largest relative difference of losses: DeepSpeed's own AdamW on CPUs; others 1e-5."""


def printed_losses(ended: Ended) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .*loss (\S+)$", ended.out, re.M)]


def worker_trains(name: str, project: Project, expected: list[float]) -> None:
    """`launch/train.py` under a common file has the losses of `dmt launch`."""
    run_dir = f"worker-{name}"
    changes = settings(CHANGES[name])
    ended = launch(
        project, common(name), WORKER, project.recipe, "--run-dir", run_dir, *changes
    )
    assert ended.code == 0, ended.err
    losses = [loss for loss, _ in curve(project.folder / run_dir).values()]
    assert losses == pytest.approx(expected, rel=SAME.get(name, 1e-5))


def losses_by_rendered_file(project: Project, changes: Mapping[str, object]) -> list[float]:
    """Of the own loop, started by the file that `dmt render` writes of a recipe."""
    file, stated = project.folder / "rendered.yaml", settings(changes)
    rendered = dmt("render", project.recipe, "--to", "accelerate", "--out", file, *stated)
    run(rendered, project.folder, code=0)
    start = tool("accelerate", "launch", "--config_file", file, LOOP, project.recipe)
    return printed_losses(run([*start, *stated], project.folder, code=0))


def test_the_worker_under_fsdp2(finetune: Project, worker_losses: list[float]) -> None:
    worker_trains("fsdp2", finetune, worker_losses)


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("name", sorted(COMMON.keys() - {"fsdp2"}))
def test_the_worker_under_every_other_file(
    name: str, finetune: Project, worker_losses: list[float]
) -> None:
    worker_trains(name, finetune, worker_losses)


@pytest.mark.parametrize("script", ["accelerate_loop.py", "hf_trainer.py"])
def test_scripts_that_train_all_weights_refuse_adapters(script: str, finetune: Project) -> None:
    changes = settings({"adapter": "{rank: 4, alpha: 8}"})
    argv = tool("python", ROOT / "launch" / "examples" / script, finetune.recipe, *changes)
    ended = run(argv, finetune.folder)
    assert ended.code == 2 and "trains all weights" in ended.err, ended.err


def test_a_loop_of_ones_own_under_zero_2(finetune: Project, worker_losses: list[float]) -> None:
    """By the file of the recipe, as it is."""
    found = losses_by_rendered_file(finetune, CHANGES["zero2"])
    assert found == pytest.approx(worker_losses, rel=1e-6)


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=lambda script: script.stem)
def test_both_examples_under_every_file(
    script: Path,
    name: str,
    finetune: Project,
    worker_losses: list[float],
) -> None:
    changes = settings(CHANGES[name])
    ended = launch(finetune, common(name), script, finetune.recipe, *changes)
    assert ended.code == 0, ended.err
    found = printed_losses(ended)
    assert len(found) == STEPS
    assert found == pytest.approx(worker_losses, rel=SAME.get(name, 1e-6))


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "nvme" not in name])
def test_every_rendered_file_starts(
    name: str, finetune: Project, worker_losses: list[float]
) -> None:
    """Also with activations that are computed again, and gradients that are not clipped."""
    changes = {f"parallel.{key}": value for key, value in LAYOUTS[name].items()}
    found = losses_by_rendered_file(finetune, changes | {"parallel.recompute": "full"})
    assert found == pytest.approx(worker_losses, rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=lambda script: script.stem)
@pytest.mark.parametrize("engine", ["ddp", "zero3", "fsdp2"])
def test_one_process_needs_no_launcher(
    script: Path, engine: str, finetune: Project, worker_losses: list[float]
) -> None:
    changes = settings(CHANGES[engine] | {"cluster.gpus_per_node": 1})
    ended = run(tool("python", script, finetune.recipe, *changes), finetune.folder, code=0)
    assert printed_losses(ended) == pytest.approx(worker_losses, rel=1e-6)


def test_a_mistake_is_one_error(finetune: Project) -> None:
    ended = run(tool("python", LOOP, finetune.recipe), finetune.folder, code=2)
    assert "2 process(es) each, the launcher started 1" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.soak
def test_random_weights_are_not_fine_tuned(finetune: Project) -> None:
    for script in (LOOP, TRAINER):
        ended = run(
            tool("python", script, finetune.folder / "recipe.yaml"), finetune.folder, code=2
        )
        assert "trains from random weights; this script fine-tunes" in ended.err
        assert "Traceback" not in ended.err
