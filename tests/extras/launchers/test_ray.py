"""Ray as the launcher: the same losses, exit codes and signals as under any other."""

import os
import secrets
import signal
import socket
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Project
from tests.e2e.elastic_run import ELASTIC, FORTY, forty_steps, losses, resized
from tests.e2e.product import (
    assert_saved_and_stopped,
    curve,
    events,
    started,
    steps_logged,
    tool,
)
from toolkit.launchers.base import free_port

pytestmark = pytest.mark.slow


def restarted(run_dir: Path, number: int) -> bool:
    """Whether the ranks have been started again so often."""
    return len(events(run_dir, "restart")) >= number


def listens(port: int) -> bool:
    """Whether a server of this machine takes connections there."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def has_met(process: psutil.Process) -> bool:
    """Whether a process is an agent that has reached the meeting point."""
    with suppress(psutil.Error):
        words = [one for one in process.cmdline() if one.startswith("launch.rendezvous=")]
        ports = [int(one.rpartition(":")[2]) for one in words]
        return any(one.raddr and one.raddr.port in ports for one in process.net_connections())
    return False


@pytest.mark.soak  # a start takes ten seconds
def test_kills_behind_new_checkpoints_are_no_failures_in_a_row(project: Project, ddp_run):
    """Rank 1 dies ten times, in the fifth step of each start."""
    run_dir = project.folder / "ray-kill"
    changes = {"training.steps": 44, "checkpoint.every_steps": 2}
    argv = project.command(run_dir.name, changes, "--launcher", "ray", "--max-restarts", "2")
    env = {"DMT_FAILPOINTS": "step=kill@rank1,hit5"}
    with started(argv, project.folder, env) as command:
        for number in range(1, 11):
            enough = partial(restarted, run_dir, number)
            command.wait_for(enough, f"restart {number}")
        ended = command.end(code=0)
    found, expected = curve(run_dir), curve(ddp_run)
    assert sorted(found) == list(range(1, 45))
    assert {step: found[step] for step in expected} == {
        step: pytest.approx(expected[step], rel=1e-5) for step in expected
    }
    assert {event["attempt"] for event in events(run_dir, "restart")} == {1}
    assert "restart 1 of 2 from step 2: rank 1 was killed by SIGKILL" in ended.err
    assert (run_dir / "export" / "model.safetensors").exists()
    assert ended.err.count(f"run directory {run_dir.name}\n") == 1
    assert ended.err.count(f"export       {run_dir.name}/export\n") == 1


@pytest.mark.soak
def test_an_elastic_run_loses_a_node_and_takes_another_in(project: Project):
    """Ray nodes with a CPU each, on this machine. The node that joins costs no step."""
    expected = forty_steps(project)
    run_dir, port = project.folder / "ray-elastic", free_port()
    one_cpu = ("--num-cpus=1", "--block", "--disable-usage-stats")
    head = tool(
        "ray", "start", "--head", f"--port={port}", "--include-dashboard=false", *one_cpu
    )
    node = tool("ray", "start", f"--address=127.0.0.1:{port}", *one_cpu)
    changes = {**ELASTIC, **FORTY, "launch.elastic": "{min_nodes: 1, max_nodes: 2}"}
    argv = project.command(run_dir.name, changes, "--launcher", "ray")
    # Stated: if an earlier Ray has left a token in this home, only a head takes it.
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    there = {**env, "RAY_ADDRESS": f"127.0.0.1:{port}"}
    with ExitStack() as nodes:
        first = nodes.enter_context(started(head, project.folder, env))
        first.wait_for(lambda: listens(port), "the first node")
        second = nodes.enter_context(started(node, project.folder, env))
        second.wait_for(lambda: len(second.alive()) > 2, "the second node")
        command = nodes.enter_context(started(argv, project.folder, there))
        command.wait_for(lambda: steps_logged(run_dir) >= 4, "steps")
        for process in second.alive():
            process.kill()
        command.wait_for(lambda: resized(run_dir) == [(2, 1)], "the run on one node")
        command.wait_for(lambda: steps_logged(run_dir) >= 8, "steps on it")
        rank = command.ranks()[0]
        rank.suspend()
        nodes.enter_context(started(node, project.folder, env))
        command.wait_for(lambda: sum(map(has_met, command.alive())) == 2, "the new agent")
        rank.resume()
        command.end(code=0)
    assert resized(run_dir) == [(2, 1), (1, 2)]
    assert events(run_dir, "resume")[-1]["dropped_metrics_lines"] == 0
    assert losses(run_dir) == expected


@pytest.mark.soak
def test_sigterm_saves_and_stops(project: Project):
    run_dir = project.folder / "ray-stop"
    argv = project.command(run_dir.name, {"training.steps": 100_000}, "--launcher", "ray")
    with started(argv, project.folder) as command:
        command.wait_for(lambda: steps_logged(run_dir) >= 2, "the second step")
        os.killpg(command.process.pid, signal.SIGTERM)  # it alone is in its group
        ended = command.end()
    assert_saved_and_stopped(ended, run_dir)


def test_a_mistake_is_told_once_and_not_tried_again(own_project: Project):
    changes = {"data.train.files": "[data/none-*.txt]"}
    ended = own_project.launch(
        "ray", changes, "--launcher", "ray", "--max-restarts", "2", code=2
    )
    assert ended.err.count("fix      correct the path") == 1
    assert "Traceback" not in ended.err
