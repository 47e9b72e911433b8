"""The launcher of Ray's driver, with a stand-in for that: what Ray did, and how a run ends."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayError

from tests.launchers.watching import WarmProcess, alive
from tests.processes import wait_until
from toolkit.errors import BackendUnavailable
from toolkit.extras.launchers import ray as ray_job
from toolkit.extras.launchers.ray import RayMachine, agent_log
from toolkit.launchers.base import Job, free_port
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, LaunchSection
from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.system.install import install

_DRIVER = """
import json, os, signal, sys, time
from pathlib import Path
from toolkit.extras.launchers.ray import agent_log
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
run = RunDirectory(Path(json.loads(sys.argv[1])["run_dir"]))
events = EventLog(run.events)
def when_asked(does):
    signal.signal(signal.SIGTERM, lambda *_: does())
{does}
"""


def launch(run: Path, does: str) -> int:
    """Launch a job whose driver does this; returns the exit code."""
    here = "(run.path / 'pid').write_text(str(os.getpid()))\n"
    ray_job._DRIVER = ("-c", _DRIVER.format(does=f"{does}\n{here}time.sleep(3600)"))
    ray_job._POLL_S = 0.05
    starter = ray_job.RayStarter()
    spec = starter.spec(Job(run, ClusterSection(), LaunchSection(), recipe="name: tiny"))
    spec.write_files()
    with StopSignals() as signals:
        return starter.run(spec, signals)


def start(run: Path, does: str) -> WarmProcess:
    return WarmProcess(run / "said", launch, run, does)


@pytest.mark.parametrize(
    ("does", "code", "printed"),
    [
        ("", 75, "no rank trained"),  # Ray waits for GPUs
        ("events.write('start')", 4, "killed by signal 15"),
        ("when_asked(lambda: (time.sleep(1), os._exit(75)))", 75, ""),
    ],
)
def test_a_stop(tmp_path: Path, does: str, code: int, printed: str) -> None:
    process, file = start(tmp_path, does), tmp_path / "pid"
    wait_until(lambda: file.exists() and file.read_text(), "the driver")
    driver = int(file.read_text())
    assert os.getsid(driver) == driver != os.getsid(process.pid)
    process.send_signal(signal.SIGTERM)
    ended, said = process.end()
    assert (ended, said.count(printed or "stopping")) == (code, 1)
    assert not alive(driver)


def test_what_the_agents_print_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    agent_log(RunDirectory(tmp_path), 0).write_text("of an earlier launch\n")
    printed = "print('error: rank', n, file=agent_log(run, n).open('a'))"
    does = f"[{printed} for n in (0, 1)]; sys.exit(4)"
    assert start(tmp_path, does).end() == (4, "error: rank 0\nerror: rank 1\n")


def test_a_driver_that_is_killed_is_told(tmp_path: Path) -> None:
    does = "os.kill(os.getpid(), 9)"
    code, printed = start(tmp_path, does).end()
    assert (code, printed) == (4, "error: Ray's driver ended: killed by signal 9\n")


def test_an_agent_of_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no threads of Ray, counts the starts before, and its death is one."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "fd00::7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "events.jsonl").write_text('{"kind": "failure"}\n' * 3)
    does = (
        "import os, sys; env = os.environ.get; print(sys.argv[2], env('OMP_NUM_THREADS'), "
        "env('DMT_ELASTIC_MEETING'), flush=True); os.kill(os.getpid(), 9)"
    )
    argv, run = [sys.executable, "-c", does], str(tmp_path)
    config = {"argv": argv, "run_dir": run, "folder": run, "meeting": "h:1", "offset": 0}
    with pytest.raises(RuntimeError, match="killed by signal 9"):
        RayMachine({**config, "env": {}}, 5).run()
    printed = agent_log(RunDirectory(tmp_path), 5).read_text()
    assert printed == "launch.rendezvous=h:1 None 3\n"
    argv = [sys.executable, "-c", "import time; time.sleep(3600)"]
    machine = RayMachine({**config, "argv": argv, "env": {}}, 5)
    machine.stop()  # that comes before `dmt launch` is there, or listens
    assert machine.run() == 75


@pytest.mark.parametrize(("restarts", "fewest", "code"), [(1, 2, 4), (2, 2, 75), (1, 1, 75)])
def test_lost_agents_are_started_again_so_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, fewest: int, code: int
) -> None:
    """Machine 1 is lost twice; then an agent says how the run ended."""
    ends = iter([RayError("node died\nof what"), RayError("again"), 75])
    started: list[int] = []
    signals = StopSignals()

    def get(_: object) -> int:
        if isinstance(end := next(ends), RayError):
            raise end
        return end

    monkeypatch.setattr("ray.wait", lambda ids, **_: (ids[-1:], ids[:-1]))
    monkeypatch.setattr("ray.get", get)
    run = RunDirectory(tmp_path)

    def start(number: int) -> Any:
        started.append(number)
        name = len(started)
        return SimpleNamespace(run=SimpleNamespace(remote=lambda: name))

    assert ray_job._run_agents(start, fewest, 2, restarts, run, signals) == code
    assert started == [0, 1, *[1] * restarts]
    events = jsonl.read(run.events)
    found = [
        event.get("reason" if event["kind"] == "failure" else "message") for event in events
    ]
    assert found == ["machine 1: node died", "machine 1: again"]
    # Where enough others train on, it is no failure of the run.
    kinds = {event["kind"] for event in events}
    assert kinds == {"warning" if fewest == 1 else "failure"}


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ([], 75),
        ([75, 75], 75),
        ([75, 4], 4),
        ([75, RayError("lost")], 75),
        ([RayError("lost"), 75], 75),
    ],
)
def test_a_stop_reaches_every_agent_and_each_may_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[Any], code: int
) -> None:
    """None is started again then; Ray may have had no room for any."""

    def wait(waiting: list[Any], **_: object) -> tuple[list[Any], list[Any]]:
        if not ends:
            return [], waiting
        return (waiting if waiting[0][0] == "stop" else waiting[:1]), []

    def get(ended: tuple[str, int]) -> int:
        if isinstance(end := ends[ended[1]], RayError):
            raise end
        return int(end)

    monkeypatch.setattr("ray.wait", wait)
    monkeypatch.setattr("ray.get", get)
    asked: list[int] = []
    signals = StopSignals()
    signals.stop_requested = True

    def start(number: int) -> Any:
        def stop() -> tuple[str, int]:
            asked.append(number)
            return "stop", number

        return SimpleNamespace(
            run=SimpleNamespace(remote=lambda: ("run", number)),
            stop=SimpleNamespace(remote=stop),
        )

    run = RunDirectory(tmp_path)
    assert ray_job._run_agents(start, 2, 2, 1, run, signals) == code
    assert asked == [0, 1]


def test_an_agent_needs_all_its_gpus_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alive = {"Alive": True, "NodeManagerAddress": "node"}
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr(
        "ray.nodes", lambda: [{**alive, "Resources": {"GPU": n}} for n in (8, 4)]
    )
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    recipe: Any = SimpleNamespace(cluster=ClusterSection(gpus_per_node=6))
    assert ray_job._connected(recipe, "GPU", 2)
    lacking = "waiting: 2 machine(s) must have 6 GPU(s) each, Ray has 8 at node, 4 at node\n"
    assert capsys.readouterr().err == lacking


def test_an_address_without_ray_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray itself would try for minutes."""
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    recipe: Any = SimpleNamespace(cluster=ClusterSection())
    assert not ray_job._connected(recipe, "CPU", 1)
    assert capsys.readouterr().err.startswith("error: no Ray at RAY_ADDRESS=127.0.0.1:")


def test_an_error_of_ray_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise ValueError("no room\nfor details")

    monkeypatch.setattr(ray_job, "_train", fails)
    assert ray_job.main({}) == 4
    assert capsys.readouterr().err == "error: Ray: ValueError: no room\n"


def test_what_is_missing_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendUnavailable, match="Ray is not installed") as raised:
        ray_job.RayStarter().spec(Job(tmp_path, ClusterSection()))
    assert raised.value.fix == install("ray")
