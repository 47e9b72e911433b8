"""`local` with real processes: how runs end, and that nothing is left behind."""

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launchers.watching import STAND_IN, WarmProcess, alive
from tests.needs import NAMESPACES, require
from tests.processes import wait_until
from toolkit.launchers import ranks as ranks_of_a_machine
from toolkit.launchers.base import Job
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.outcome import RankExit, report_failure
from toolkit.launchers.process import FAILED_GRACE_S, StopSignals
from toolkit.recipe.schema import ClusterSection
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import PEER_LOST


def run_stand_ins(run_dir: Path, behaviour: str, failed_grace_s: float) -> int:
    """Launch two stand-in workers; returns the exit code."""
    ranks_of_a_machine.FAILED_GRACE_S = failed_grace_s
    worker = tuple(map(str, (STAND_IN, run_dir, behaviour)))
    launcher = LocalStarter()
    spec = launcher.spec(Job(run_dir, ClusterSection(gpus_per_node=2), worker=worker))
    with StopSignals() as signals:
        return launcher.run(spec, signals)


class Launch:
    """A launcher process with two stand-in workers."""

    def __init__(self, run_dir: Path, behaviour: str, failed_grace_s: float) -> None:
        self.run_dir = run_dir
        arguments = run_dir, behaviour, failed_grace_s
        self.process = WarmProcess(run_dir / "said", run_stand_ins, *arguments)
        self.end = self.process.end

    def worker_pids(self) -> list[int]:
        """Wait until all workers are there; return their process ids by rank."""
        files = [self.run_dir / f"pid-{rank}" for rank in range(2)]
        wait_until(
            lambda: all(file.exists() and file.read_text() for file in files), "all workers"
        )
        return [int(file.read_text()) for file in files]

    def signal_group(self, number: signal.Signals) -> None:
        os.killpg(self.process.pid, number)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(behaviour: str, failed_grace_s: float = FAILED_GRACE_S) -> Launch:
        launches.append(Launch(tmp_path, behaviour, failed_grace_s))
        return launches[-1]

    yield start
    for launch in launches:
        launch.process.kill()
        for file in tmp_path.glob("pid-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids), "the end of all workers")


def test_all_ranks_done(start):
    launch = start("done")
    assert launch.end()[0] == 0
    for rank in range(2):
        argv = json.loads((launch.run_dir / f"argv-{rank}").read_text())
        assert argv[1:] == [str(launch.run_dir), "done"], "no launcher adds an argument"


def alone(run_dir: Path) -> int:
    """Launch where loopback is down."""
    new_network = 0x40000000
    assert ctypes.CDLL(None).unshare(new_network) == 0
    return run_stand_ins(run_dir, "done", 1)


def test_ranks_that_cannot_connect_to_each_other_are_not_started(tmp_path):
    """They waited for each other in silence, for minutes."""
    require(NAMESPACES)
    _, errors = WarmProcess(tmp_path / "said", alone, tmp_path).end()
    assert "BackendUnavailable: the ranks meet at 127.0.0.1" in errors
    assert "ip link set lo up" in errors
    assert not [*tmp_path.glob("pid-*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda n: n.name)
def test_a_signal_to_the_launcher_saves_and_stops(start, number):
    launch = start("sleep")
    pids = launch.worker_pids()
    launch.process.send_signal(number)
    assert launch.end()[0] == 75
    assert_gone(pids)


def test_ctrl_c_reaches_each_rank_once_which_saves(start):
    launch = start("sleep")
    pids = launch.worker_pids()
    launch.signal_group(signal.SIGINT)
    assert launch.end()[0] == 75
    assert_gone(pids)
    assert [(launch.run_dir / f"asked-{rank}").read_text() for rank in range(2)] == ["1", "1"]


@pytest.mark.parametrize("code", [2, 3])
def test_the_failing_rank_is_named_with_its_log_and_a_user_error_kept(start, code):
    launch = start(f"fail=1:{code}")
    pids = launch.worker_pids()
    exit_code, errors = launch.end()
    assert exit_code == code
    assert f"error: rank 1 failed with exit code {code}" in errors
    assert "the reason it failed" in errors
    assert_gone(pids)


def test_what_rank_0_told_is_not_told_again(start):
    exit_code, errors = start("fail=0:4 telling").end()
    assert exit_code == 4
    assert errors.count("error: ") == 1
    assert "error: told by itself" in errors


@pytest.mark.parametrize("behaviour", ["fail=0:4", "fail=1:4 telling"])
def test_a_rank_that_the_user_has_not_heard_is_named(start, tmp_path, behaviour):
    # What was told in an earlier launch does not count.
    earlier = {"kind": "end", "rank": 0, "exit_code": 4, "error": "told then"}
    (tmp_path / "events.jsonl").write_text(json.dumps(earlier) + "\n")
    exit_code, errors = start(behaviour).end()
    assert exit_code == 4
    assert f"error: rank {behaviour[5]} failed with exit code 4" in errors


def test_a_killed_rank_is_named_although_its_end_is_seen_last(start):
    launch = start("fail=0:4 losing stubborn")
    pids = launch.worker_pids()
    wait_until(lambda: not alive(pids[0]), "the end of the rank that lost the other")
    os.kill(pids[1], signal.SIGKILL)
    exit_code, errors = launch.end()
    assert exit_code == 4
    assert "error: rank 1 was killed by SIGKILL" in errors


def test_a_stop_before_the_workers_listen_is_no_failure(start):
    launch = start("early")
    pids = launch.worker_pids()
    launch.process.send_signal(signal.SIGTERM)
    assert launch.end()[0] == 75
    assert_gone(pids)


def test_a_stopped_rank_does_not_hold_up_the_end(start):
    """Foreign launchers would wait 30 s for it, after each failure."""
    launch = start("sleep")
    pids = launch.worker_pids()
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    assert launch.end()[0] == 4
    assert time.monotonic() - began < 30
    assert_gone(pids)


def test_a_rank_that_does_not_follow_a_failed_one_is_killed_after_the_grace(start):
    launch = start("fail=1:1 stubborn", failed_grace_s=0.5)
    pids = launch.worker_pids()
    code, errors = launch.end()
    assert code == 4
    assert "rank 1 failed with exit code 1" in errors
    assert not alive(pids[0])


def test_no_orphan_when_the_launcher_is_killed(start):
    launch = start("sleep")
    pids = launch.worker_pids()
    launch.process.kill()
    assert_gone(pids)


def test_the_third_ctrl_c_kills(start):
    launch = start("stubborn")
    pids = launch.worker_pids()
    launch.signal_group(signal.SIGINT)
    wait_until(lambda: "Ctrl-C twice more" in launch.process.said(), "the first message")
    assert launch.process.poll() is None
    # Signals that come at once count as one: the user goes on until the third is seen.
    while any(map(alive, pids)):
        launch.signal_group(signal.SIGINT)
        time.sleep(0.2)
    assert launch.end()[0] == 4


def test_output_of_other_ranks_goes_to_their_log_without_secrets(start, monkeypatch):
    monkeypatch.setenv("CANARY_TOKEN", "canary-7d1f2c9b")
    launch = start("done")
    launch.end()
    log = (launch.run_dir / "logs" / "rank-1.log").read_text()
    assert log == "rank 1 is here, ***\n"


LOST, HUNG, KILLED, ABORTED = PEER_LOST, "hang: nothing done for 5 s", -9, -6


@pytest.mark.parametrize("cause", [0, 1])
@pytest.mark.parametrize(
    ("told", "seen", "named"),
    [
        # By rank, the one that is the cause first: the errors that they wrote, how they ended.
        ((HUNG, LOST), (None, 4), "failed with exit code 4"),
        ((None, LOST), (KILLED, 4), "was killed by SIGKILL"),
        # NCCL's own thread ends the ranks that lost one, without a word of theirs.
        ((None, None), (KILLED, ABORTED), "was killed by SIGKILL"),
        ((None, None), (ABORTED, None), "was killed by SIGABRT"),
    ],
)
def test_a_rank_that_lost_another_is_not_the_cause(tmp_path, capsys, cause, told, seen, named):
    ranks = (cause, 1 - cause)
    run = RunDirectory(tmp_path)
    with run.events.open("a") as events:
        for rank, error in zip(ranks, told, strict=True):
            if error is not None:
                event = {"kind": "end", "rank": rank, "exit_code": 4, "error": error}
                events.write(json.dumps(event) + "\n")
    exits = [RankExit(r, code) for r, code in zip(ranks, seen, strict=True) if code is not None]
    _, reason = report_failure(
        run, jsonl.read(run.events), sorted(exits, key=lambda one: one.rank)
    )
    assert reason == f"rank {cause} {named}"
    # Rank 0 has the terminal: what it wrote, it said itself.
    silent = cause == 0 and told[0] is not None
    assert (f"error: {reason}" in capsys.readouterr().err) != silent
