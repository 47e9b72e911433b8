"""Bad batches and bad machines: the run goes on without them, or stops and says why."""

import math
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.faulty_worker import FLIPPED
from tests.e2e.product import (
    Ended,
    checkpoints,
    curve,
    events,
    records,
    run,
    settings,
    steps_logged,
    tool,
)

pytestmark = pytest.mark.slow

FAULTY_WORKER = Path(__file__).with_name("faulty_worker.py")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")


def with_fault(project: Project, fault: str, run_dir: str, **changes: object) -> Ended:
    """Two ranks of ddp under torchrun, one of them with a fault."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    argv = tool(*TORCHRUN, FAULTY_WORKER, project.recipe, "--run-dir", run_dir)
    return run([*argv, *settings(changes)], project.folder, {"DMT_TEST_FAULT": fault})


def test_a_nan_batch_on_one_rank_is_skipped_once(project: Project, ddp_run: Path):
    ended = with_fault(project, "nan@1,5", "nan")
    assert ended.code == 0, ended.err
    run_dir = project.folder / "nan"
    (skip,) = events(run_dir, "skip")
    assert (skip["step"], skip["why"], skip["loss"]) == (5, "the loss is not finite", "NaN")
    assert ended.err.count("step 5  skipped: the loss is not finite") == 1
    assert [m["step"] for m in records(run_dir / "metrics.jsonl") if m["skipped"]] == [5]
    unspoiled, spoiled = curve(ddp_run), curve(run_dir)
    assert all(spoiled[step] == unspoiled[step] for step in range(1, 5))
    # One update fewer, and no harm done.
    assert spoiled[6] != unspoiled[6]
    assert spoiled[20][0] == pytest.approx(unspoiled[20][0], rel=0.1)


def test_a_flipped_bit_is_found_and_not_saved(project: Project):
    ended = with_fault(
        project, "flip@1,6", "flip", guard__replica_check_every_steps=4,
        checkpoint__every_steps=1, checkpoint__keep=10,
    )  # fmt: skip
    assert ended.code != 0
    (message,) = [line for line in ended.err.splitlines() if line.startswith("error:")]
    assert "step 8: rank 0 (" in message
    assert "), rank 1 (" in message
    assert "there is no majority" in message
    assert message.endswith("; first in " + FLIPPED)
    assert "Weights were last equal at step 4" in ended.err
    # A start would load all replicas from one that is corrupt, and find them equal.
    assert checkpoints(project.folder / "flip") == [1, 2, 3, 4]
    aside = sorted(p.name for p in (project.folder / "flip" / "checkpoints").glob("*.suspect"))
    assert aside == [f"step-{step:08}.suspect" for step in (5, 6, 7)]
    assert f"{', '.join(aside)}".replace(".suspect", "") + " got the ending" in ended.err
    (end,) = [one for one in events(project.folder / "flip", "end") if "error" in one]
    assert end["retry"] is False


def test_a_run_that_skips_every_step_stops(project: Project):
    changes = {
        "optimizer.learning_rate": 1e30,
        "guard.max_skips_in_a_row": 3,
        "checkpoint.every_steps": 1,
    }
    ended = run(
        project.command("diverged", changes, "--max-restarts", "2"), project.folder, code=4
    )
    run_dir = project.folder / "diverged"
    last = steps_logged(run_dir)
    assert f"error: steps {last - 2} to {last} were all skipped: " in ended.err
    assert ended.err.count("  fix: look at the data of these steps") == 1
    assert [event["step"] for event in events(run_dir, "skip")] == [last - 2, last - 1, last]
    assert max(checkpoints(run_dir)) == last - 3, "none while steps are skipped"
    assert not events(run_dir, "restart")
    assert all(math.isfinite(loss) for loss, _ in list(curve(run_dir).values())[: last - 3])
    assert "Traceback" not in ended.err


def test_nothing_to_compare_is_said_once(project: Project):
    changes = {
        "parallel.engine": "deepspeed",
        "parallel.zero.stage": 3,
        "guard.replica_check_every_steps": 1,
        "training.steps": 3,
        "checkpoint.export": False,
    }
    ended = project.launch("sharded", changes)
    assert ended.err.count("warning: guard.replica_check_every_steps: the weights are sh") == 1
    (warning,) = events(project.folder / "sharded", "warning")
    assert warning["step"] == 1
