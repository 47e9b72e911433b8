"""Every run ends with its plan's prediction beside what was measured."""

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import events, started, steps_logged

pytestmark = pytest.mark.slow

ONE_RANK = {"cluster.gpus_per_node": 1, "checkpoint.export": False}


def test_a_finished_run_is_compared(ddp_run: Path) -> None:
    (event,) = events(ddp_run, "prediction")
    plan = json.loads((ddp_run / "plan.json").read_text())
    assert event["predicted"] == plan["predicted"]
    assert event["predicted"]["basis"] == "nominal"
    assert event["predicted"]["step_time_s"] == pytest.approx(plan["step_time_s"])
    measured = event["measured"]
    assert measured["steps"] == 19 and event["step"] == 20
    assert 0 < measured["step_time_s"] < 60
    assert 0.1 < measured["process_gib"] < 16


def test_a_calibrated_and_stopped_run_is_compared(project: Project) -> None:
    """After a signal too; and the next start compares its own steps only."""
    file = project.folder / "slow.yaml"
    speeds = "{tflops: {fp32: 0.001}, memory_gigabytes_per_s: 1}"
    file.write_text(f"nodes: 1\ngpus_per_node: 1\ngpu: cpu\nmeasured: {speeds}\n")
    run_dir = project.folder / "stopped"
    settings = {**ONE_RANK, "training.steps": 1_000_000, "logging.every_steps": 1}
    command = [*project.command(run_dir.name, settings), "--cluster", str(file)]
    with started(command, project.folder) as running:
        running.wait_for(lambda: steps_logged(run_dir) >= 3, "three steps")
        running.process.send_signal(signal.SIGTERM)
        ended = running.end(code=75)
    (event,) = events(run_dir, "prediction")
    assert event["predicted"]["basis"] == "calibrated"
    assert event["measured"]["steps"] == event["step"] - 1
    ratio = event["measured"]["step_time_s"] / event["predicted"]["step_time_s"]
    assert event["measured_over_predicted"]["step_time"] == pytest.approx(ratio)
    assert "predicted from measured speeds (" in ended.err
