"""Stopped, killed or extended: a run that is started again is the uninterrupted one."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import checkpoints, curve, events, steps_logged
from toolkit.checkpoint.manifest import Manifest
from toolkit.run.directory import RunDirectory
from toolkit.train.exporting import export_last
from toolkit.train.watchdog import Marks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def extended_run(project: Project) -> Path:
    """Ten steps, then the same command for twenty, as on a terminal: phases have a bar."""
    for steps in (10, 20):
        terminal = {"FORCE_COLOR": "1"}
        ended = project.launch("extended", {"training.steps": steps}, env=terminal)
    assert "continuing from step 10 of 20, extended/checkpoints/step-00000010" in ended.err
    return project.folder / "extended"


def test_continued_metrics_equal_the_uninterrupted_run_to_the_bit(extended_run, ddp_run):
    assert curve(extended_run) == curve(ddp_run)
    losses = [events(run, "evaluation")[-1]["loss"] for run in (extended_run, ddp_run)]
    assert losses[0] == losses[1]
    weights = [digest(run / "export/model.safetensors") for run in (extended_run, ddp_run)]
    assert weights[0] == weights[1]


def digest(file: Path) -> str:
    """For comparisons: pytest would take half an hour to show how the bytes differ."""
    return sha256(file.read_bytes()).hexdigest()


def test_the_resume_is_recorded_and_old_checkpoints_stay(extended_run):
    (resume,) = events(extended_run, "resume")
    assert (resume["step"], resume["dropped_metrics_lines"]) == (10, 0)
    assert checkpoints(extended_run) == [10, 20]
    assert len((extended_run / "command.txt").read_text().splitlines()) == 2


def test_a_finished_run_that_is_started_again_changes_nothing(project: Project, extended_run):
    before = curve(extended_run)
    manifest = extended_run / "checkpoints" / "step-00000020" / "manifest.json"

    def written() -> dict[Path, tuple[int, bytes]]:
        files = [manifest, *(extended_run / "export").iterdir()]
        return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    (extended_run / "export" / "README.md").write_text("A model card of the user's own.\n")
    files = written()
    ended = project.launch("extended")
    assert curve(extended_run) == before
    assert checkpoints(extended_run) == [10, 20]
    assert written() == files, "not written again, where a kill could harm"
    assert "finished: extended/checkpoints/step-00000020 is step 20 of 20" in ended.err
    assert len(events(extended_run, "evaluation")) == 2, "nothing is built to validate again"
    assert ended.err.endswith("export       extended/export\n")


@pytest.mark.parametrize("lost", ["the folder", "the event"])
def test_a_finished_run_writes_an_export_that_is_missing(ddp_run, tmp_path, lost):
    """A kill while the files are written leaves a folder without an event."""
    run_dir = shutil.copytree(ddp_run, tmp_path / "run")
    weights = run_dir / "export" / "model.safetensors"
    whole, config = digest(weights), run_dir / "export" / "config.json"
    if lost == "the folder":
        shutil.rmtree(run_dir / "export")
    else:
        weights.write_bytes(weights.read_bytes()[:-1])
        lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["kind"] != "export"]
        (run_dir / "events.jsonl").write_text("".join(kept))
    export_last(RunDirectory(run_dir), 20, Marks(1))
    assert digest(weights) == whole
    assert config.exists()


def test_a_run_starts_from_anothers_weights(project: Project, ddp_run):
    """The weights and nothing else: a step that changes none leaves the other run's loss."""
    start = {"model.init": "checkpoint", "model.checkpoint": "ddp"}
    start |= {"parallel.engine": "megatron", "parallel.tensor": 2}
    still = {"training.steps": 1, "optimizer.learning_rate": 1e-30, "training.seed": 7}
    project.launch("from-weights", {**start, **still})
    run_dir = project.folder / "from-weights"
    first, last = (events(one, "evaluation")[-1]["loss"] for one in (run_dir, ddp_run))
    assert first == pytest.approx(last, rel=1e-6)
    manifest = Manifest.read(run_dir / "checkpoints" / "step-00000001")
    assert (manifest.optimizer_steps, manifest.consumed_samples) == (1, 8)
    chosen = manifest.recipe["model"]["checkpoint"]
    assert chosen == str(ddp_run / "checkpoints" / "step-00000020")


def test_changed_data_are_refused(project: Project, ddp_run):
    """accelerate#2016, transformers#40691: a cursor in other data would replay or skip."""
    run_dir = shutil.copytree(ddp_run, project.folder / "other-data")
    document = project.folder / "data" / "07.txt"
    text = document.read_text()
    document.write_text("This was not here before.\n" * 9)
    try:
        ended = project.launch(run_dir.name, {"training.steps": 22}, code=2)
    finally:
        document.write_text(text)
    assert ended.err.count("was trained on different data") == 1, ended.err
    assert "fix: restore the data files" in ended.err
    assert "Traceback" not in ended.err
    assert steps_logged(run_dir) == 20


def test_a_checkpoint_of_another_run_is_refused(own_project: Project, ddp_run):
    """Its tensors would be cut to fit: a run with other weights, and no word of it."""
    run_dir = own_project.folder / "other-model"
    shutil.copytree(ddp_run / "checkpoints", run_dir / "checkpoints")
    changes = {"training.steps": 22, "model.config.num_hidden_layers": 1}
    ended = own_project.launch(run_dir.name, changes, code=2)
    assert "belongs to another run: model.config.num_hidden_layers was 2, is 1" in ended.err
    assert "model.layers.1.input_layernorm.weight is [" in ended.err
    assert "] in the checkpoint, missing in the recipe's model" in ended.err
    assert not (run_dir / "metrics.jsonl").exists()
    shutil.copytree(run_dir / "checkpoints", own_project.folder / "same-model" / "checkpoints")
    ended = own_project.launch("same-model", {"training.steps": 22})
    assert steps_logged(own_project.folder / "same-model") == 22


def test_a_schedule_and_a_rate_that_change_on_request(project: Project, ddp_run):
    run_dir = shutil.copytree(ddp_run, project.folder / "changed")
    linear = {"training.steps": 22, "schedule.name": "linear"}
    ended = project.launch(run_dir.name, linear, code=2)
    assert "--change schedule.name=linear" in ended.err
    changes = "--change", "schedule.name=linear", "--change", "optimizer.learning_rate=1e-3"
    ended = project.launch(run_dir.name, {"training.steps": 22}, *changes)
    assert "continues at learning rate 9.09e-05 instead of 0.003" in ended.err
    changed = {event["key"]: event["now"] for event in events(run_dir, "change")}
    assert changed == {"schedule.name": "linear", "optimizer.learning_rate": 1e-3}
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line)["lr"] for line in lines]
    assert rates[20:] == pytest.approx([1e-3 * 2 / 22, 1e-3 * 1 / 22])
    for other in (
        {},
        {"optimizer.eps": 1e-6},
    ):  # nothing is recorded of a launch that is refused
        asked = "--change", "optimizer.weight_decay=0" if other else "training.seed=1"
        ended = project.launch(run_dir.name, {"training.steps": 22, **other}, *asked, code=2)
        assert ("optimizer.eps" if other else "training.seed") in ended.err
    assert len(events(run_dir, "change")) == len(changed)
