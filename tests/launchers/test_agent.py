"""Agents of two machines, here two processes that meet on this one, with real processes."""

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launchers.watching import WarmProcess
from tests.processes import wait_until
from toolkit.launchers.agent import JOIN_LIMIT_S, _parameters
from toolkit.launchers.base import NODE_ADDRESS, Job, Meeting, free_port
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.process import StopSignals
from toolkit.recipe.schema import ClusterSection, LaunchSection

WORKER = Path(__file__).with_name("progressing.py")


def run_agent(run_dir: Path, port: int, max_restarts: int, *worker: str) -> int:
    """Launch a worker on one of two machines; returns the exit code."""
    launch = LaunchSection(rendezvous=f"127.0.0.1:{port}", max_restarts=max_restarts)
    launcher = LocalStarter()
    spec = launcher.spec(Job(run_dir, ClusterSection(nodes=2), launch))
    spec = replace(spec, argv=(sys.executable, "-S", *worker))
    with StopSignals() as signals:
        return launcher.run(spec, signals)


class Agents:
    """Those of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.port = run_dir, free_port()
        self.processes: list[WarmProcess] = []

    def start(self, restarts: int, last: int, code: int = 0) -> None:
        """Start another one; see progressing.py."""
        said = self.run_dir / f"said-{len(self.processes)}"
        worker = map(str, (WORKER, self.run_dir, last, code))
        arguments = self.run_dir, self.port, restarts, *worker
        self.processes.append(WarmProcess(said, run_agent, *arguments))

    def end(self) -> tuple[list[int], str]:
        """Their exit codes, and what they printed."""
        codes, printed = zip(*(process.end() for process in self.processes), strict=True)
        return [*codes], "\n".join(printed)

    def starts(self) -> list[list[str]]:
        """Meeting port and number of ranks of each start, by rank."""
        files = (self.run_dir / f"starts-{rank}" for rank in (0, 1))
        return [file.read_text().splitlines() for file in files]


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    for process in made.processes:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(10, marks=pytest.mark.soak)])
def test_a_newer_checkpoint_renews_the_restarts(agents: Agents, kills: int) -> None:
    for _ in range(2):
        agents.start(2, kills)
    codes, printed = agents.end()
    assert codes == [0, 0], printed
    assert printed.count("restart 1 of 2 from step ") == kills
    assert f"restart 1 of 2 from step {kills}: rank 1 was killed by SIGKILL" in printed
    for starts in agents.starts():
        assert len(starts) == kills + 1
        assert {line.split()[1] for line in starts} == {"2"}


@pytest.mark.slow
@pytest.mark.parametrize("code", [2, 75])
def test_what_is_no_failure_is_not_started_again(agents: Agents, code: int) -> None:
    (agents.run_dir / "checkpoints" / "step-00000001").mkdir(parents=True)
    (agents.run_dir / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    for _ in range(2):
        agents.start(2, 1, code)
    assert agents.end()[0] == [code, code]
    assert [len(starts) for starts in agents.starts()] == [1, 1]


def test_machines_wait_until_ray_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those without which the run cannot begin, or continue."""
    monkeypatch.setenv(NODE_ADDRESS, "here")
    waits = [
        _parameters(Meeting("there:1", "run", 0, 2, 2, elastic)).get_as_int("join_timeout", 0)
        for elastic in (False, True)
    ]
    assert waits[0] > 24 * 3600 and waits[1] == JOIN_LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("host_is_there", [True, False])
def test_a_stop_while_it_waits_for_others(agents: Agents, host_is_there: bool) -> None:
    """At the meeting point, and where nothing listens there yet."""
    if not host_is_there:
        agents.port = 1
    agents.start(0, 1)
    (process,) = agents.processes

    def waits() -> bool:
        if host_is_there:
            with suppress(OSError), socket.create_connection(("127.0.0.1", agents.port), 1):
                return True
            return False
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        (caught,) = (int(line.split()[1], 16) for line in status if "SigCgt" in line)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    wait_until(waits, "the agent")
    process.send_signal(signal.SIGTERM)
    assert agents.end()[0] == [75]
