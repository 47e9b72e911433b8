"""An elastic run on hosts of tests/e2e/two_hosts.py."""

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import Command, Ended, curve, events, steps_logged
from tests.e2e.two_hosts import TwoHosts

SETTINGS: Mapping[str, object] = {
    "optimizer.learning_rate": 3e-4,  # at 3e-3, sixty steps multiply rounding by ten thousand
    "training.global_batch_size": 12,
    "cluster.gpus_per_node": 1,
    "checkpoint.every_steps": 1,
    "checkpoint.export": "false",
}
ELASTIC: Mapping[str, object] = {
    **SETTINGS,
    "cluster.nodes": 2,
    "launch.elastic": "{min_nodes: 1, max_nodes: 3}",
    "launch.max_restarts": 3,
    "launch.hang_timeout_s": 20,
}
FORTY: Mapping[str, object] = {"training.steps": 40}
PORT = 29400
"""Of the meeting point."""


def forty_steps(project: Project) -> dict[int, float]:
    """The losses of a run that nothing happens to, to compare with."""
    run_dir = project.folder / "elastic-undisturbed"
    if not run_dir.exists():
        project.launch(run_dir.name, {**SETTINGS, **FORTY, "cluster.gpus_per_node": 2})
    return {step: pytest.approx(loss, rel=1e-5) for step, (loss, _) in curve(run_dir).items()}


def losses(run_dir: Path) -> dict[int, float]:
    """The losses of a run by step."""
    return {step: loss for step, (loss, _) in curve(run_dir).items()}


def resized(run_dir: Path) -> list[tuple[int, int]]:
    """Numbers of ranks before and after, of every change."""
    return [(event["from"], event["to"]) for event in events(run_dir, "resize")]


def _lines(file: Path) -> list[str]:
    with suppress(OSError):
        return file.read_text().splitlines()[1:]
    return []


class ElasticRun:
    """The run; `dmt launch` is started on each host by `join`."""

    def __init__(self, hosts: TwoHosts, project: Project, name: str, meet: str) -> None:
        self.hosts, self.project = hosts, project
        self.run_dir = project.folder / name
        self.meet = meet
        self.commands: dict[str, Command] = {}

    def join(self, host: str, changes: Mapping[str, object]) -> None:
        """Start it on a host."""
        stated = {**ELASTIC, **changes, "launch.rendezvous": f"{self.meet}:{PORT}"}
        command = self.project.command(self.run_dir.name, stated, "--launcher", "local")
        self.commands[host] = Command(command, self.project.folder, self.hosts.env(host))

    def reach(self, step: int) -> None:
        """Wait for a step. Fails when the run ends before."""
        self.wait_for(lambda: steps_logged(self.run_dir) >= step, f"step {step}")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds, while the run goes on."""
        self.commands[self.meet].wait_for(condition, what)

    @contextmanager
    def cut(self, host: str) -> Iterator[None]:
        """A host without its network; what runs there ends with the block."""
        self.hosts.cut(host)
        try:
            yield
        finally:
            self.commands.pop(host).kill()
            self.hosts.mend(host)

    @contextmanager
    def paused(self, host: str) -> Iterator[None]:
        """The rank of a host is stopped."""
        (rank,) = self.commands[host].ranks().values()
        rank.suspend()
        try:
            yield
        finally:
            with suppress(psutil.NoSuchProcess):
                rank.resume()

    def has_met(self, host: str) -> bool:
        """Whether the agent of a host has reached the one of the meeting point."""
        network = Path(f"/proc/{self.commands[host].process.pid}/net")
        lines = [line.split() for name in ("tcp", "tcp6") for line in _lines(network / name)]
        return any(
            remote.endswith(f":{PORT:04X}") and state == "01"
            for _, _, remote, state, *_ in lines
        )

    def is_to_save(self, host: str) -> bool:
        """Whether the rank of a host, which is paused, has a signal to save waiting."""
        (rank,) = self.commands[host].ranks().values()
        (pending,) = [
            line for line in _lines(Path(f"/proc/{rank.pid}/status")) if "ShdPnd" in line
        ]
        return bool(int(pending.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    def end(self, host: str) -> Ended:
        """Wait for the end there."""
        return self.commands[host].end()

    @property
    def losses(self) -> dict[int, float]:
        """Those that were logged, by step."""
        return losses(self.run_dir)


@contextmanager
def elastic_run(
    hosts: TwoHosts, project: Project, name: str, meet: str
) -> Iterator[ElasticRun]:
    """A run that nobody has joined yet, whose machines meet at host `meet`."""
    run = ElasticRun(hosts, project, name, meet)
    try:
        yield run
    finally:
        for command in run.commands.values():
            command.kill()
