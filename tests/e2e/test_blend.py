"""A blend of sources as users run it: validation per source, weights that change, resumes."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import curve, events

SOURCES = [
    {"kind": "text", "label": "low", "files": ["data/0*.txt"], "weight": 0.7},
    {"kind": "text", "label": "high", "files": ["data/[12]*.txt"], "weight": 0.3},
]
OTHERS = {"low": "data/30.txt", "high": "data/3[1-9].txt"}
VALIDATION = [
    {"kind": "text", "label": name, "files": [files]} for name, files in OTHERS.items()
]
BLEND: dict[str, object] = {
    "data.train": SOURCES,
    "data.validation": VALIDATION,
    "data.validation_fraction": 0,
    "training.steps": 6,
    "checkpoint.export": "false",
    "checkpoint.every_steps": 3,
    "cluster.gpus_per_node": 1,
}
STAGE = [{"from_step": 4, "weights": {"low": 0.1, "high": 0.9}}]


def evaluation(run_dir: Path) -> Mapping[str, float]:
    return events(run_dir, "evaluation")[-1]


@pytest.mark.slow
def test_a_blend(project: Project) -> None:
    ended = project.launch("blend", BLEND)
    found = evaluation(project.folder / "blend")
    one_by_one = {name: found[f"validation/{name}"] for name in OTHERS}
    said = ", ".join(f"{name} {loss:.4f}" for name, loss in one_by_one.items())
    assert f"validation loss {found['loss']:.4f} ({said})" in ended.err
    tokens = 0
    for name, files in OTHERS.items():  # the same run, validated on one source alone
        alone = {"data.validation": {"kind": "text", "files": [files]}}
        run_dir = f"blend-{name}"
        project.launch(run_dir, BLEND | alone)
        theirs = evaluation(project.folder / run_dir)
        assert theirs["loss"] == one_by_one[name]
        assert curve(project.folder / run_dir) == curve(project.folder / "blend")
        tokens += theirs["tokens"]
    assert found["tokens"] == tokens

    # In another layout, stopped half way: the same samples.
    halves = BLEND | {"cluster.gpus_per_node": 2, "training.micro_batch_size": 4}
    for steps in (3, 6):
        ended = project.launch("blend-2", halves | {"training.steps": steps})
    losses, others = (
        [loss for loss, _ in curve(project.folder / name).values()]
        for name in ("blend", "blend-2")
    )
    assert others == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_weights_change_by_stages_only(project: Project) -> None:
    project.launch("staged", BLEND | {"training.steps": 3})
    other = [SOURCES[0] | {"weight": 0.5}, SOURCES[1] | {"weight": 0.5}]
    ended = project.launch("staged", BLEND | {"data.train": other}, code=2)
    assert "data.train" in ended.err
    early = [STAGE[0] | {"from_step": 2}]
    ended = project.launch("staged", BLEND | {"data.stages": early}, code=None)
    assert ended.code != 0
    assert "add a stage to data.stages from step 3 on" in ended.err
    ended = project.launch("staged", BLEND | {"data.stages": STAGE})
    project.launch("staged-at-once", BLEND | {"data.stages": STAGE})
    assert curve(project.folder / "staged") == curve(project.folder / "staged-at-once")
