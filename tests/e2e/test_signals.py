"""Ctrl-C, preemption and impatience: the run saves, says how to go on, and is gone."""

import shlex
import signal
import time

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import (
    assert_saved_and_stopped,
    checkpoints,
    events,
    run,
    settings,
    started,
    steps_logged,
    tool,
)
from tests.processes import ROOT
from tests.warm_program import warm_program

pytestmark = pytest.mark.slow

ENDLESS = {"training.steps": 100_000}
WORKER = str(ROOT / "launch" / "train.py")


def test_a_signal_to_one_rank_saves_and_stops_all(project: Project):
    """Ctrl-C is in test_two_runs.py."""
    run_dir = project.folder / "signal-quit"
    argv = project.command(run_dir.name, ENDLESS, "--max-restarts", "3")
    with started(argv, project.folder) as command:
        command.wait_for(lambda: steps_logged(run_dir) >= 2, "the second step")
        command.ranks()[1].send_signal(signal.SIGQUIT)
        ended = command.end()
    assert_saved_and_stopped(ended, run_dir)
    assert not events(run_dir, "restart")


def test_output_that_cannot_be_written_does_not_stop_a_run(project: Project):
    """A full log disk, a closed standard output: `2>&1 | head`, a killed `tee`."""
    run_dir = project.folder / "no-output"
    changes = {"training.steps": 3, "cluster.gpus_per_node": 1}
    _, *words = project.command(run_dir.name, changes)
    argv = shlex.join([warm_program(), *words])
    shell = f"set -o pipefail; {argv} 2>/dev/full | true"
    run(["bash", "-c", shell], project.folder, code=0)
    assert checkpoints(run_dir) == [3]


def test_a_signal_behind_the_last_step_costs_nothing(project: Project):
    """Automodel#405: the weights of a whole run must not hang on its last second."""
    run_dir = project.folder / "late"
    with started(project.command("late", {"training.steps": 3}), project.folder) as command:
        command.wait_for(lambda: steps_logged(run_dir) == 3, "the last step")
        command.interrupt()
        command.end(code=0)
    assert checkpoints(run_dir) == [3]
    assert (run_dir / "export" / "tokenizer.json").exists()


def test_the_third_ctrl_c_ends_a_save_that_hangs(project: Project):
    run_dir = project.folder / "hanging-save"
    changes = {**ENDLESS, "cluster.gpus_per_node": 1}
    argv = tool("python", WORKER, project.recipe, "--run-dir", run_dir, *settings(changes))
    env = {"DMT_FAILPOINTS": "checkpoint.write=hang@rank0,hit1"}
    with started(argv, project.folder, env) as command:
        command.wait_for(lambda: steps_logged(run_dir) >= 2, "the second step")
        command.interrupt()
        command.wait_for(
            lambda: list((run_dir / "checkpoints").glob("*.tmp")), "a save that has begun"
        )
        for _ in range(2):
            time.sleep(0.2)
            assert command.process.poll() is None
            command.interrupt()
        ended = command.end(code=4)
    assert ended.err.count("error: ended by the third Ctrl-C") == 1
    assert "Traceback" not in ended.err
    assert events(run_dir, "end")[-1]["error"].startswith("ended by the third Ctrl-C")
    assert checkpoints(run_dir) == []
