"""`dmt launch` of a recipe with `parallel.outer`: the holder, in this process, and a launch of
its own for every replica that runs on this machine.

    RUN/holder/                 states of the holder
    RUN/replicas/N/             the run directory of replica N
    RUN/replicas/N/launch.log   what its launcher printed; the first one's is on the terminal
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from toolkit.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    CheckpointError,
    PlanError,
)
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.holder import Holder, listening
from toolkit.extras.outer.states import begun, settle, states
from toolkit.extras.tune.trial import (
    DeviceSlice,
    device_slices,
    end_launcher,
    start_on,
    wait_until_free,
)
from toolkit.launcher import LAUNCHERS
from toolkit.launchers.base import DMT, LOOPBACK, free_port
from toolkit.launchers.launching import Origin
from toolkit.launchers.outcome import USER_CODES
from toolkit.launchers.process import POLL_S, STOPPING, Deadline, StopSignals
from toolkit.recipe.dump import in_yaml
from toolkit.run.assignment import Assignment, write
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.text.terminal import tell

STARTED = "DMT_OUTER_REPLICA"
"""Set for the launches of replicas, which start ranks and no holder."""
_GRACE_S = 60.0
"""Time that replicas at other sites have to leave after a stop."""
_EXIT_CODES = (*USER_CODES, EXIT_FAILED, EXIT_RESUMABLE, EXIT_DONE)
"""Of all replicas: the first of these that one has."""


@dataclass
class Replicas:
    """The replicas that run here, and the holder if it does."""

    assignment: Assignment
    settings: OuterSection
    origin: Origin
    cluster: str | None
    """As `--cluster`."""
    changes: Sequence[str]
    numbers: Sequence[int]
    """Of the replicas that are started; the holder comes with the first of all."""
    place: str
    """HOST:PORT of the holder."""
    _running: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _stopping: bool = False
    _grace: Deadline = field(default_factory=Deadline)

    @property
    def run(self) -> RunDirectory:
        """The directory of all."""
        return RunDirectory(self.assignment.run_dir)

    def directory(self, replica: int) -> RunDirectory:
        """That of a replica."""
        return RunDirectory(self.run.path / "replicas" / str(replica))

    @property
    def _folder(self) -> Path:
        return self.run.path / "holder"

    def _log(self, replica: int) -> Path:
        return self.directory(replica).path / "launch.log"

    def command(self, replica: int) -> list[str]:
        """What starts a replica."""
        stated = {"parallel.outer.replica": replica, "parallel.outer.holder": self.place}
        words = [f"{key}={value}" for key, value in stated.items()]
        recipe = self.assignment.recipe
        changed = [f"{key}={in_yaml(attrgetter(key)(recipe))}" for key in self.changes]
        return [
            *(sys.executable, *DMT, "launch", str(self.run.recipe)),
            *("--run-dir", str(self.directory(replica).path)),
            *(word for setting in words for word in ("--set", setting)),
            *(word for setting in changed for word in ("--change", setting)),
            *(("--cluster", self.cluster) if self.cluster else ()),
        ]

    def printable(self) -> str:
        """The commands of the replicas, for a shell; the holder has none of its own."""
        commands = {number: shlex.join(self.command(number)) for number in self.numbers}
        return " &\n".join(f"{STARTED}={n} {command}" for n, command in commands.items())

    def start(self) -> int:
        """Start all, wait, and return the exit code. Raises PlanError, CheckpointError or
        DirectoryInUse before anything is started."""
        slices = self._slices()
        with StopSignals() as signals, ExitStack() as stack:
            server = self._claim(stack) if 0 in self.numbers else None
            write(self.assignment, self.origin.command, self.origin.places())
            for number in self.numbers:
                self.directory(number).path.mkdir(parents=True, exist_ok=True)
                wait_until_free(self.directory(number).path)
            holder = None if server is None else self._holder(server)
            EventLog(self.run.events).write("launch", time=self.origin.started)
            tell(f"run: {self.run.path}, replicas {', '.join(map(str, self.numbers))}")
            for number, devices in zip(self.numbers, slices, strict=True):
                self._running[number] = self._start(number, devices)
                stack.callback(end_launcher, self._running[number])
            if holder is not None:
                stack.enter_context(closing(holder))
                holder.serve()  # threads come after the processes, which have forked
            code = self._wait(signals, holder)
        if code in (EXIT_DONE, EXIT_RESUMABLE):
            EventLog(self.run.events).write("end", exit_code=code, rank=0)
        else:
            reason = f"a replica: see {self.run.path / 'replicas'}"
            EventLog(self.run.events).write("failure", exit_code=code, reason=reason)
        return code

    def _claim(self, stack: ExitStack) -> socket.socket:
        """The holder's folder and place are this launch's, and its run may be continued."""
        folder, checkpoint = self._folder, self.assignment.recipe.checkpoint
        with suppress(OSError):  # which `claimed` explains
            folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(claimed(RunDirectory(folder)))
        saved = states(folder)
        if saved and saved[0].replicas != self.settings.replicas:
            raise CheckpointError(
                f"parallel.outer.replicas is {self.settings.replicas}, and the samples of "
                f"{self.run.path} are divided among {saved[0].replicas}",
                fix=f"set it to {saved[0].replicas}; a replica that is not started is left out",
            )
        there = saved or any(begun(self.directory(one)) for one in self.numbers)
        if there and checkpoint.resume == "never":
            raise CheckpointError(
                f"{self.run.path} has checkpoints, and checkpoint.resume is never",
                fix="--run-dir OTHER, or checkpoint.resume: auto to continue",
            )
        return stack.enter_context(listening(self.place))

    def _holder(self, server: socket.socket) -> Holder:
        """The holder, with the state that all continue from."""
        replicas = map(self.directory, self.numbers)
        state = settle(self._folder, replicas, delayed=self.settings.overlap == "delayed")
        return Holder(self.assignment.recipe, self.run, server, state, self.numbers)

    def _slices(self) -> list[DeviceSlice]:
        cluster, count = self.assignment.recipe.cluster, len(self.numbers)
        try:
            return device_slices(cluster, count)
        except PlanError as error:
            raise PlanError(
                f"parallel.outer: {count} replicas with {cluster.gpus_per_node} GPUs each are "
                "to start here, where fewer work",
                fix="fewer replicas, a smaller cluster.gpus_per_node, or one replica on each "
                "machine: --set parallel.outer.replica=N --set parallel.outer.holder=HOST:PORT",
            ) from error

    def _start(self, number: int, devices: DeviceSlice) -> "subprocess.Popen[bytes]":
        """Start a replica's launch; one of them prints to the terminal."""
        env = {STARTED: str(number)}
        if len(self.numbers) > 1 and not devices.cores:  # fewer cores than replicas
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        with self._log(number).open("ab") as log:
            output = None if number == self.numbers[0] else log
            command = self.command(number)
            return start_on(devices, command, output, die=signal.SIGTERM, env=env)

    def _wait(self, signals: StopSignals, holder: Holder | None) -> int:
        """Exit code of the replicas here, once they have ended, and those of other sites have
        left the holder."""
        codes: dict[int, int] = {}
        while len(codes) < len(self._running) or self._serves(signals, holder):
            if signals.stop_requested and not self._stopping:
                self._stop(STOPPING, holder)
            if signals.kill_requested:
                self._signal(signal.SIGKILL)
            for number, process in self._running.items():
                if number not in codes and (code := process.poll()) is not None:
                    codes[number] = code if code in _EXIT_CODES else EXIT_FAILED
                    self._ended(number, code, holder)
            time.sleep(POLL_S)
        return next(code for code in _EXIT_CODES if code in codes.values())

    def _serves(self, signals: StopSignals, holder: Holder | None) -> bool:
        """Whether replicas of other sites take part; after a stop they have a while."""
        others = {*holder.rounds.live} - {*self.numbers} if holder else set()
        return bool(others) and not (self._grace.passed or signals.kill_requested)

    def _stop(self, why: str, holder: Holder | None) -> None:
        """The holder first: then no round ends without the replicas that stop."""
        self._stopping = True
        self._grace.start(_GRACE_S)
        tell(why)
        if holder is not None:
            holder.stop()
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(number)

    def _ended(self, number: int, code: int, holder: Holder | None) -> None:
        """Report a replica that has failed, unless a stop has killed it before it handles
        signals; the others do not wait for one that has ended."""
        if code not in (EXIT_DONE, EXIT_RESUMABLE) and not (self._stopping and code < 0):
            shown = number == self.numbers[0]
            where = "its message is above" if shown else f"see {self._log(number)}"
            tell(f"replica {number} has failed with exit code {code}: {where}")
        if holder is None or self._stopping:
            return
        if code in USER_CODES and not holder.has_round:
            self._stop("a mistake before the first exchange: the others are stopped", holder)
        else:
            holder.rounds.give_up(number)


def instead(
    assignment: Assignment,
    settings: OuterSection,
    origin: Origin,
    cluster: str | None,
    changes: Sequence[str],
) -> Replicas | None:
    """What `dmt launch` starts; None for the launch of a replica itself.

    Raises PlanError where its launcher would not wait.
    """
    if STARTED in os.environ:
        return None
    name, nodes = assignment.recipe.launch.launcher, assignment.recipe.cluster.nodes
    if not (LAUNCHERS[name].supervises(nodes) or LAUNCHERS[name].waits):
        raise PlanError(
            f"launch.launcher: {name} hands its job over, and parallel.outer waits for them",
            fix="--set launch.launcher=local inside of a job for each replica, with --set "
            "parallel.outer.replica=N --set parallel.outer.holder=HOST:PORT",
        )
    alone = settings.replica
    numbers = range(settings.replicas) if alone is None else [alone]
    holder = settings.holder or f"{LOOPBACK}:{free_port()}"
    return Replicas(assignment, settings, origin, cluster, changes, numbers, holder)
