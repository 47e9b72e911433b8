"""An elastic run on hosts of tests/e2e/two_hosts.py, and what is seen of its steps."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import Command, Ended, curve, events, records
from tests.e2e.two_hosts import TwoHosts
from tests.processes import wait_until

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
SIXTY: Mapping[str, object] = {"training.steps": 60}
PORT = 29400
"""Of the meeting point."""


def sixty_steps(project: Project) -> dict[int, float]:
    """The losses of a run that nothing happens to, to compare with."""
    run_dir = project.folder / "elastic-undisturbed"
    if not run_dir.exists():
        project.launch(run_dir.name, {**SETTINGS, **SIXTY, "cluster.gpus_per_node": 2})
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
        self.seen: list[tuple[float, int]] = []
        """Time and number of every step that was logged, repeated ones again."""
        self.losses: dict[int, float] = {}
        self._over = threading.Event()

    def join(self, host: str, changes: Mapping[str, object]) -> None:
        """Start it on a host."""
        stated = {**ELASTIC, **changes, "launch.rendezvous": f"{self.meet}:{PORT}"}
        command = self.project.command(self.run_dir.name, stated, "--launcher", "local")
        on_host = self.hosts.on(host, command)
        self.commands[host] = Command(on_host, self.project.folder, self.hosts.env)

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return self.seen[-1][1] if self.seen else 0

    def reach(self, step: int) -> None:
        """Wait for a step. Fails when the run ends before."""

        def reached() -> bool:
            ends = {host: one.process.poll() for host, one in self.commands.items()}
            assert self.step >= step or ends[self.meet] is None, f"{ends}\n{self.printed()}"
            return self.step >= step

        wait_until(reached, f"step {step}", self.printed)

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

    def printed(self) -> str:
        """What the hosts printed."""
        return "\n".join(f"--- {host}\n{one.printed()}" for host, one in self.commands.items())

    def end(self, host: str) -> Ended:
        """Wait for the end there."""
        return self.commands[host].end()

    def idle_s(self, resize: Mapping[str, Any]) -> float | None:
        """Seconds between the last step before this event and the first one after it; None if
        the last step of the run was before it."""
        at = datetime.fromisoformat(resize["time"]).timestamp()
        before = max(when for when, _ in self.seen if when < at)
        after = min((when for when, _ in self.seen if when >= at), default=None)
        return None if after is None else round(after - before, 2)

    def look(self) -> None:
        """Note what was logged, until the end."""
        last = None
        while not self._over.wait(0.02):
            lines = records(self.run_dir / "metrics.jsonl")
            if lines and lines[-1] != last:
                last = lines[-1]
                self.seen.append((time.time(), last["step"]))
        lines = records(self.run_dir / "metrics.jsonl")
        self.losses = {line["step"]: line["loss"] for line in lines}

    def over(self) -> None:
        """Stop looking, and leave no process behind."""
        self._over.set()
        for command in self.commands.values():
            command.kill()


@contextmanager
def elastic_run(
    hosts: TwoHosts, project: Project, name: str, meet: str
) -> Iterator[ElasticRun]:
    """A run that nobody has joined yet, whose machines meet at host `meet`."""
    run = ElasticRun(hosts, project, name, meet)
    looking = threading.Thread(target=run.look)
    looking.start()
    try:
        yield run
    finally:
        run.over()
        looking.join()
