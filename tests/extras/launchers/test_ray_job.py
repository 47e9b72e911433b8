"""The launcher of Ray's driver, with a stand-in for that: what Ray did, and how a run ends."""

import importlib.util
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launchers.watching import WarmProcess, alive
from tests.processes import wait_until
from toolkit.errors import BackendUnavailable
from toolkit.extras.launchers import ray_driver, ray_job
from toolkit.extras.launchers.ray_job import agents_log
from toolkit.launchers.base import Job, LaunchSpec
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection
from toolkit.run.directory import RunDirectory

_DRIVER = """
import json, sys, time
from pathlib import Path
from toolkit.extras.launchers.ray_job import agents_log
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
run = RunDirectory(Path(json.loads(sys.argv[1])["run_dir"]))
events = EventLog(run.events)
def asked():
    while not run.stop.exists():
        time.sleep(0.02)
    run.stop.unlink()
{does}
"""


def launch(run: Path, does: str) -> int:
    """Launch a job whose driver does this; returns the exit code."""
    ray_job._DRIVER = ("-c", _DRIVER.format(does=does))
    ray_job._POLL_S, ray_job.ORPHAN_GRACE_S = 0.05, 0.3
    (run / "launch").mkdir()
    with StopSignals() as signals:
        return ray_job.RayStarter().run(LaunchSpec((), run), signals).exit_code


def start(run: Path, does: str) -> WarmProcess:
    here = f"Path({str(run / 'pid')!r}).write_text(str(__import__('os').getpid()))\n"
    process = WarmProcess(run / "said", launch, run, here + does)
    wait_until(lambda: (run / "pid").exists() and (run / "pid").read_text(), "the driver")
    return process


def test_a_stop_while_ray_waits_for_gpus(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(3600)")
    driver = int((tmp_path / "pid").read_text())
    assert os.getsid(driver) == driver != os.getsid(process.pid)
    process.send_signal(signal.SIGTERM)
    code, printed = process.end()
    assert (code, printed.count("no rank trained")) == (75, 1)
    assert not alive(driver) and not (tmp_path / "stop").exists()


def test_a_request_to_stop_outlives_a_restart_of_the_ranks(tmp_path: Path) -> None:
    does = "for _ in range(2):\n events.write('start'); asked()\nsys.exit(75)"
    process = start(tmp_path, does)
    process.send_signal(signal.SIGTERM)
    assert process.end()[0] == 75
    assert not (tmp_path / "stop").exists()


def test_ranks_that_train_may_save_as_long_as_they_need(tmp_path: Path) -> None:
    does = "events.write('start'); asked(); time.sleep(1); sys.exit(75)"
    process = start(tmp_path, does)
    wait_until((tmp_path / "events.jsonl").exists, "the ranks")
    process.send_signal(signal.SIGTERM)
    assert process.end()[0] == 75


def test_what_the_agents_print_is_shown_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    agents_log(RunDirectory(tmp_path)).write_text("of an earlier launch\n")
    does = "print('error: rank 1', file=agents_log(run).open('a'), flush=True); sys.exit(4)"
    assert start(tmp_path, does).end() == (4, "error: rank 1\n")


def test_a_driver_that_is_killed_is_told(tmp_path: Path) -> None:
    does = "__import__('os').kill(__import__('os').getpid(), 9)"
    code, printed = start(tmp_path, does).end()
    assert (code, printed) == (4, "error: Ray's driver ended: killed by signal 9\n")


def test_an_error_of_ray_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: object) -> int:
        raise ValueError("no room\nfor details")

    monkeypatch.setattr(ray_driver, "_train", fails)
    assert ray_driver.main({}) == 4
    assert capsys.readouterr().err == "error: Ray: ValueError: no room\n"


def test_what_is_missing_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ray` alone lacks what Ray Train imports."""
    monkeypatch.setitem(sys.modules, "ray.train", None)
    assert ray_driver.main({}) == 3
    fix = "pip install 'ray[train]>=2.60'"
    assert capsys.readouterr().err.endswith(f"\n  fix: {fix}\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BackendUnavailable, match="Ray is not installed") as raised:
        ray_job.RayStarter().spec(Job(tmp_path, ClusterSection()))
    assert raised.value.fix == fix
