"""`accelerate launch --config_file` really starts what the files say."""

import re
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


def test_the_worker_under_fsdp2(finetune: Project, worker_losses: list[float]) -> None:
    """`launch/train.py` under a common file has the losses of `dmt launch`."""
    changes = settings(CHANGES["fsdp2"])
    arguments = [finetune.recipe, "--run-dir", "worker-fsdp2", *changes]
    ended = launch(finetune, common("fsdp2"), WORKER, *arguments)
    assert ended.code == 0, ended.err
    losses = [loss for loss, _ in curve(finetune.folder / "worker-fsdp2").values()]
    assert losses == pytest.approx(worker_losses, rel=1e-5)


def test_a_loop_of_ones_own_under_zero_2(finetune: Project, worker_losses: list[float]) -> None:
    """By the file that `dmt render` writes of the recipe, as it is."""
    file, stated = finetune.folder / "rendered.yaml", settings(CHANGES["zero2"])
    rendered = dmt("render", finetune.recipe, "--to", "accelerate", "--out", file, *stated)
    run(rendered, finetune.folder, code=0)
    start = tool("accelerate", "launch", "--config_file", file, LOOP, finetune.recipe)
    found = printed_losses(run([*start, *stated], finetune.folder, code=0))
    assert found == pytest.approx(worker_losses, rel=1e-6)


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("name", COMMON)
@pytest.mark.parametrize("script", [LOOP, TRAINER], ids=lambda script: script.stem)
def test_both_examples_under_every_file(
    script: Path, name: str, finetune: Project, worker_losses: list[float]
) -> None:
    if (script, name) == (TRAINER, "fsdp2"):
        return  # on CPUs, a Trainer does not shard by FSDP2, and the script says so
    changes = settings(CHANGES[name])
    ended = launch(finetune, common(name), script, finetune.recipe, *changes)
    assert ended.code == 0, ended.err
    found = printed_losses(ended)
    assert len(found) == STEPS
    assert found == pytest.approx(worker_losses, rel=SAME.get(name, 1e-6))


def test_a_mistake_is_one_error(finetune: Project) -> None:
    ended = run(tool("python", LOOP, finetune.recipe), finetune.folder, code=2)
    assert "2 process(es) each, the launcher started 1" in ended.err
    assert "Traceback" not in ended.err
