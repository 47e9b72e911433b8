"""Deaths, hangs and signals in real runs: they go on by themselves to the same end."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.layouts import LAYOUTS
from tests.e2e.product import (
    Ended,
    curve,
    events,
    settings,
    started,
    steps_logged,
    tool,
)
from tests.processes import HANG_S, ROOT
from toolkit.launchers.base import free_port

pytestmark = pytest.mark.slow

OFTEN = {"checkpoint.every_steps": 4}
LIMIT_S = 10.0
"""After which a rank hangs; a busy machine must take a step in less."""


def assert_finished(ended: Ended, run_dir: Path, undisturbed: Path) -> None:
    assert ended.code == 0, ended.err
    assert curve(run_dir) == curve(undisturbed), "the same to the bit"
    for resume in events(run_dir, "resume"):
        assert resume["step"] % OFTEN["checkpoint.every_steps"] == 0
    for replay in events(run_dir, "replay"):
        # A save that is in flight when a rank dies is lost, too.
        assert replay["to_step"] - replay["from_step"] <= 2 * OFTEN["checkpoint.every_steps"]


def test_a_killed_rank_is_started_again(project: Project, ddp_run: Path):
    # Frozen first, so that the run is not over before the kill.
    run_dir = project.folder / "alive-kill"
    argv = project.command(run_dir.name, OFTEN, "--max-restarts", "1")
    with started(argv, project.folder) as command:
        command.wait_for(lambda: steps_logged(run_dir) >= 5, "the fifth step")
        ranks = command.ranks()
        for rank in ranks.values():
            rank.suspend()
        ranks[1].kill()
        ranks[0].resume()
        ended = command.end()
    assert_finished(ended, run_dir, ddp_run)
    (restart,) = events(run_dir, "restart")
    assert (restart["attempt"], restart["reason"]) == (1, "rank 1 was killed by SIGKILL")
    assert f"restart 1 of 1 from step {restart['from_step']}" in ended.err
    (launch,) = events(run_dir, "launch")
    first, second = events(run_dir, "start")
    assert launch["time"] < first["time"] < restart["time"] < second["time"]
    assert 0 < second["seconds"] < HANG_S


def test_a_stopped_rank_is_found_and_the_run_goes_on(project: Project, ddp_run: Path):
    changes = {**OFTEN, "launch.hang_timeout_s": LIMIT_S}
    env = {"DMT_FAILPOINTS": "step=stop@rank1,hit18"}
    ended = project.launch("alive-stop", changes, "--max-restarts", "1", env=env)
    run_dir = project.folder / "alive-stop"
    assert_finished(ended, run_dir, ddp_run)
    hang, *_ = hangs = events(run_dir, "hang")
    assert {event["rank"] for event in hangs} == {0}, "one that is stopped says nothing"
    (restart,) = events(run_dir, "restart")
    assert restart["reason"] == f"rank 1 hung in step {hang['step'] + 1}"
    assert "stopped or frozen: rank 1" in ended.err
    for log in (run_dir / "logs" / "rank-0.log", run_dir / "logs" / "rank-1.log"):
        assert "toolkit/train/loop.py" in log.read_text(), "stacks of every rank"


def test_torchruns_own_restart(project: Project, ddp_run: Path):
    """Its restarted ranks meet again, though the store still has the dead ones' addresses."""
    run_dir = project.folder / "alive-torchrun"
    worker = [ROOT / "launch" / "train.py", project.recipe, "--run-dir", run_dir]
    torchrun = ["--max-restarts", "2", "--nproc-per-node", "2", "--master-port"]
    argv = tool("torchrun", *torchrun, str(free_port()), *worker, *settings(OFTEN))
    with started(argv, project.folder, {"DMT_FAILPOINTS": "step=kill@rank1,hit13"}) as command:
        ended = command.end()
    assert_finished(ended, run_dir, ddp_run)
    (restart,) = events(run_dir, "restart")
    assert restart["attempt"] == 1


@pytest.mark.parametrize(("place", "rank"), [("export", 0), ("leaving", 1)])
def test_a_hang_after_the_last_step_is_found(project: Project, place: str, rank: int):
    changes = {"training.steps": 2, "launch.hang_timeout_s": LIMIT_S}
    env = {"DMT_FAILPOINTS": f"{place}=hang@rank{rank}"}
    ended = project.launch(f"alive-{place}", changes, env=env, code=4)
    assert "error: hang: nothing done for 10 s" in ended.err
    hangs = events(project.folder / f"alive-{place}", "hang")
    assert ["failpoint" in hang["where"] for hang in hangs if hang["rank"] == rank] == [True]


# One for each library whose collectives wait.
@pytest.mark.parametrize("layout", ["zero3", "fsdp3", "megatron-pp2"])
def test_a_hung_rank_is_named_before_a_collective_times_out(project: Project, layout: str):
    changes = {**LAYOUTS[layout], "launch.hang_timeout_s": 5.0}
    env = {"DMT_FAILPOINTS": "step=hang@rank1,hit4"}
    ended = project.launch(f"hang-{layout}", changes, env=env, code=4)
    assert "error: hang: nothing done for 5 s" in ended.err
    assert "Timed out" not in ended.err, "PyTorch's abort of a collective"
    hangs = events(project.folder / f"hang-{layout}", "hang")
    where = {event["rank"]: event["where"] for event in hangs}
    assert where and "failpoint" in where.get(1, "failpoint"), "or it could say nothing"
