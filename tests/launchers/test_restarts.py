"""`--max-restarts` on one machine: what is started again, how often, and what is not."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launchers.watching import WarmProcess, alive
from tests.processes import wait_until
from toolkit.launchers import agent
from toolkit.launchers.base import PORTS, Job, Meeting
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.outcome import failure_reason, newest_step
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, LaunchSection
from toolkit.run.directory import RunDirectory
from toolkit.run.events import PEER_LOST
from toolkit.text.terminal import tell

# A worker of one line: `starts` counts its starts, `save(step)` commits.
_WORKER = """
import os, sys, time
from pathlib import Path
run = Path({run!r})
with (run / "starts").open("a") as file:
    file.write(os.environ["MASTER_PORT"] + "\\n")
starts = len((run / "starts").read_text().split())
def save(step):
    folder = run / "checkpoints" / f"step-{{step:08}}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text("{{}}")
{does}
"""


def launch(run: Path, worker: str, max_restarts: int) -> int:
    """Launch the worker; returns the exit code. No name server has to answer."""
    socket.getfqdn = _no_look_up
    launcher, section = LocalStarter(), LaunchSection(max_restarts=max_restarts)
    spec = launcher.spec(Job(run, ClusterSection(), section, worker=("-c", worker)))
    with StopSignals() as signals:
        return launcher.run(spec, signals)


def _no_look_up(*_: str) -> str:
    raise AssertionError("looks for this machine's full name")


def forgotten(*arguments: Any) -> int:
    """`launch`, in a meeting that forgets an agent after a second without a sign of life."""
    parameters = agent._parameters

    def short(meeting: Meeting) -> Any:
        made = parameters(meeting)
        made.config |= {"keep_alive_interval": 1, "keep_alive_max_attempt": 1}
        return made

    agent._parameters = short
    return launch(*arguments)


def stopped_late(*arguments: Any) -> int:
    """`launch`, asked to stop as soon as it has announced a restart."""

    def told(message: str) -> None:
        tell(message)
        if message.startswith("restart "):
            os.kill(os.getpid(), signal.SIGTERM)

    agent.tell = told
    return launch(*arguments)


def start(
    run: Path, does: str, max_restarts: int, how: Callable[..., int] = launch
) -> WarmProcess:
    worker = _WORKER.format(run=str(run), does=does)
    return WarmProcess(run / "said", how, run, worker, max_restarts)


def run_to_end(
    run: Path, does: str, max_restarts: int
) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit code, standard error, and the events that do not only state a failure."""
    code, errors = start(run, does, max_restarts).end()
    events = run / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    found = [json.loads(line) for line in lines]
    return code, errors, [one for one in found if one["kind"] != "failure"]


def ports(run: Path) -> list[str]:
    return (run / "starts").read_text().split()


def test_a_crash_without_progress_is_tried_again_so_often(tmp_path):
    code, errors, events = run_to_end(tmp_path, "save(3); sys.exit(1)", 2)
    assert code == 4
    # The first start saved step 3: its failure has not used up anything.
    assert len(ports(tmp_path)) == len(set(ports(tmp_path))) == 3
    assert all(int(port) in PORTS for port in ports(tmp_path)), "none that a client may take"
    assert [(event["kind"], event["attempt"]) for event in events] == [
        ("restart", 1),
        ("restart", 2),
    ]
    assert {event["from_step"] for event in events} == {3}
    assert {event["reason"] for event in events} == {"rank 0 failed with exit code 1"}
    assert "error: 2 restarts in a row without a new checkpoint behind step 3" in errors
    assert errors.count("rank 0 failed with exit code 1") == 3 + 2 + 1


def test_progress_renews_the_restarts(tmp_path):
    does = "save(starts); sys.exit(0 if starts == 4 else 1)"
    code, _, events = run_to_end(tmp_path, does, 1)
    assert code == 0
    assert [(event["attempt"], event["from_step"]) for event in events] == [
        (1, 1),
        (1, 2),
        (1, 3),
    ]


def test_half_a_checkpoint_is_no_progress(tmp_path):
    does = "(run / 'checkpoints' / f'step-{starts:08}').mkdir(parents=True); sys.exit(1)"
    code, _, events = run_to_end(tmp_path, does, 1)
    assert (code, len(events)) == (4, 1)
    assert newest_step(RunDirectory(tmp_path)) == 0


@pytest.mark.parametrize("code", [0, 2, 3, 75])
def test_what_is_no_failure_is_not_started_again(tmp_path, code):
    assert run_to_end(tmp_path, f"sys.exit({code})", 3)[0] == code
    assert len(ports(tmp_path)) == 1


def test_a_failure_that_would_come_again_is_not_tried_again(tmp_path):
    end = '{"kind": "end", "rank": 0, "exit_code": 4, "error": "no", "retry": false}'
    does = f"(run / 'events.jsonl').write_text('{end}' + chr(10)); sys.exit(4)"
    code, errors, events = run_to_end(tmp_path, does, 3)
    assert (code, len(ports(tmp_path))) == (4, 1)
    assert "not started again" in errors
    assert [event["kind"] for event in events] == ["end"]


def end(rank: int, error: str) -> dict[str, Any]:
    return {"kind": "end", "rank": rank, "exit_code": 4, "error": error}


START = {"kind": "start", "world": 3}


@pytest.mark.parametrize(
    ("events", "outcome", "reason"),
    [
        ([], "rank 1 failed with exit code 1", "rank 1 failed with exit code 1"),
        (
            [end(1, PEER_LOST), end(2, "MemoryError: no room\n  fix: more")],
            "rank 1 failed with exit code 4",
            "rank 2: MemoryError: no room",
        ),
        ([end(0, PEER_LOST)], "rank 1 was killed by SIGKILL", "rank 1 was killed by SIGKILL"),
        (
            [START, end(0, PEER_LOST), end(2, PEER_LOST)],
            "rank 0 failed with exit code 4",
            "rank 1 was killed, or its machine is gone",
        ),
        (
            [START, end(0, PEER_LOST)],
            "rank 0 failed with exit code 4",
            "a rank was killed, or its machine is gone",
        ),
        (
            [START, *({"kind": "hang", "rank": rank, "step": 4} for rank in (0, 2))],
            "rank 0 failed with exit code 4",
            "rank 1 hung in step 5",
        ),
    ],
)
def test_the_reason_of_a_restart(events, outcome, reason):
    assert failure_reason(events, outcome) == reason


def test_children_of_a_rank_that_died_do_not_stay(tmp_path):
    does = (
        "import subprocess; child = subprocess.Popen(['sleep', '3600']); "
        "(run / 'child').write_text(str(child.pid)); os._exit(1)"
    )
    assert run_to_end(tmp_path, does, 0)[0] == 4
    wait_until(lambda: not alive(int((tmp_path / "child").read_text())), "the child's end")


def test_without_restarts_a_failure_is_reported_as_before(tmp_path):
    code, errors, events = run_to_end(tmp_path, "sys.exit(1)", 0)
    assert (code, events) == (4, [])
    assert "restart" not in errors
    recorded = json.loads((tmp_path / "events.jsonl").read_text())
    assert (recorded["kind"], recorded["exit_code"]) == ("failure", 4)
    assert recorded["reason"] == "rank 0 failed with exit code 1"


@pytest.mark.parametrize(
    ("does", "expected"), [("save(3); sys.exit(1)", 75), ("sys.exit(1)", 4)]
)
def test_a_signal_before_a_restart_is_told(tmp_path, does, expected):
    code, errors = start(tmp_path, does, 5, how=stopped_late).end()
    assert code == expected
    saved = "step 3 is saved" if expected == 75 else "nothing was saved"
    assert f"stopped by a signal before a restart; {saved}" in errors
    assert '"restart"' not in (tmp_path / "events.jsonl").read_text(), "none was made"
    assert len(ports(tmp_path)) == 1


def test_a_pause_of_the_launcher_restarts_nothing(tmp_path):
    """Ctrl-Z and `fg`, or a laptop that slept; afterwards a failure is restarted, once."""
    does = (
        "while not (run / 'go').exists(): time.sleep(0.02)\nsys.exit(0 if starts == 2 else 1)"
    )
    process = start(tmp_path, does, 1, how=forgotten)
    wait_until((tmp_path / "starts").exists, "the rank")
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    time.sleep(1.5)  # the agent asks once a second who has met
    assert len(ports(tmp_path)) == 1
    (tmp_path / "go").touch()
    code, errors = process.end()
    assert code == 0, errors
    assert len(ports(tmp_path)) == 2
    assert (tmp_path / "events.jsonl").read_text().count('"restart"') == 1


def test_a_folder_that_cannot_be_made_is_no_machine_that_did_not_come(tmp_path):
    (tmp_path / "logs").touch()
    launcher = LocalStarter()
    spec = launcher.spec(Job(tmp_path, ClusterSection(), worker=("-c", "")))
    with StopSignals() as signals, pytest.raises(FileExistsError):
        launcher.run(spec, signals)


def test_a_run_that_is_killed_by_the_user_is_not_started_again(tmp_path):
    does = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); save(1); "
        "time.sleep(60)"
    )
    process = start(tmp_path, does, 5)
    wait_until(lambda: newest_step(RunDirectory(tmp_path)) == 1, "a checkpoint")
    # Signals that come at once count as one: the user goes on until the third is seen.
    ranks = psutil.Process(process.pid).children()
    while any(alive(rank.pid) for rank in ranks):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.end()[0] == 4
    assert len(ports(tmp_path)) == 1
