"""`dmt launch` of a recipe with `parallel.outer`: the holder, and a launch of its own for every
replica that runs on this machine.

    RUN/holder/                 settings and states of the holder
    RUN/replicas/N/             the run directory of replica N
    RUN/replicas/N/launch.log   what its launcher printed; the first one's is on the terminal
    RUN/set-aside/              checkpoints behind the step from which all continue
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path

from toolkit.checkpoint.store import CheckpointStore, step_of
from toolkit.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUMABLE,
    CheckpointError,
    PlanError,
    RunFailed,
)
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.holder import Served, State, states
from toolkit.extras.outer.link import leave_out
from toolkit.extras.outer.wire import address
from toolkit.extras.tune.trial import DeviceSlice, device_slices, wait_until_free
from toolkit.launcher import LAUNCHERS
from toolkit.launchers.base import DMT, LOOPBACK, free_port
from toolkit.launchers.launching import Origin
from toolkit.launchers.outcome import USER_CODES
from toolkit.launchers.process import POLL_S, STOPPING, StopSignals, die_with_parent
from toolkit.recipe.dump import in_yaml
from toolkit.run.assignment import Assignment, write
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.run.ending import events_offset
from toolkit.run.events import EventLog
from toolkit.run.recorded import read_events
from toolkit.text.terminal import tell

STARTED = "DMT_OUTER_REPLICA"
"""Set for the launches of replicas, which start ranks and no holder."""


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
    """Of the replicas that are started."""
    holder: str
    """HOST:PORT."""
    _running: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _before: int = 0
    """See `events_offset`."""

    @property
    def run(self) -> RunDirectory:
        """The directory of all."""
        return RunDirectory(self.assignment.run_dir)

    @property
    def holds(self) -> bool:
        """Whether the holder runs here."""
        return 0 in self.numbers

    def folder(self, replica: int) -> Path:
        """The run directory of a replica."""
        return self.run.path / "replicas" / str(replica)

    def _log(self, replica: int) -> Path:
        return self.folder(replica) / "launch.log"

    def command(self, replica: int) -> list[str]:
        """What starts a replica."""
        stated = {"parallel.outer.replica": replica, "parallel.outer.holder": self.holder}
        words = [f"{key}={value}" for key, value in stated.items()]
        recipe = self.assignment.recipe
        changed = [f"{key}={in_yaml(attrgetter(key)(recipe))}" for key in self.changes]
        return [
            *(sys.executable, *DMT, "launch", str(self.run.recipe)),
            *("--run-dir", str(self.folder(replica))),
            *(word for setting in words for word in ("--set", setting)),
            *(word for setting in changed for word in ("--change", setting)),
            *(("--cluster", self.cluster) if self.cluster else ()),
        ]

    def printable(self) -> str:
        """The commands, for a shell."""
        holder = [sys.executable, "-m", "toolkit.extras.outer.holder", str(self._holder_folder)]
        commands = [holder] * self.holds + [self.command(number) for number in self.numbers]
        return " &\n".join(map(shlex.join, commands))

    @property
    def _holder_folder(self) -> Path:
        return self.run.path / "holder"

    def start(self) -> int:
        """Start all, wait, and return the exit code. Raises PlanError or DirectoryInUse before
        anything is started."""
        slices = self._slices()
        with ExitStack() as stack:
            if self.holds:
                with suppress(OSError):  # which `claimed` explains
                    self._holder_folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(claimed(RunDirectory(self._holder_folder)))
                require_port(self.holder)
            self._refuse_to_resume()
            return self._start(slices)

    def _start(self, slices: list[DeviceSlice]) -> int:
        write(self.assignment, self.origin.command, self.origin.places())
        for number in self.numbers:
            self.folder(number).mkdir(parents=True, exist_ok=True)
            wait_until_free(self.folder(number))
        if self.holds:
            self._settle_states()
        self._before = events_offset(self.run.path)
        EventLog(self.run.events).write("launch", time=self.origin.started)
        tell(f"run: {self.run.path}, replicas {', '.join(map(str, self.numbers))}")
        with StopSignals() as signals, ExitStack() as stack:
            holder = stack.enter_context(self._holder()) if self.holds else None
            for number, devices in zip(self.numbers, slices, strict=True):
                self._running[number] = stack.enter_context(self._replica(number, devices))
            code = self._wait(signals, holder)
        if code in (EXIT_DONE, EXIT_RESUMABLE):
            EventLog(self.run.events).write("end", exit_code=code, rank=0)
        else:
            reason = f"a replica or the holder: see {self.folder(0).parent}"
            EventLog(self.run.events).write("failure", exit_code=code, reason=reason)
        return code

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

    def _refuse_to_resume(self) -> None:
        """Before anything is moved: raises CheckpointError if there is a run that must not be
        continued."""
        there = states(self._holder_folder) or any(map(self._steps, self.numbers))
        if there and self.assignment.recipe.checkpoint.resume == "never":
            raise CheckpointError(
                f"{self.run.path} has checkpoints, and checkpoint.resume is never",
                fix="--run-dir OTHER, or checkpoint.resume: auto to continue",
            )

    def _settle_states(self) -> None:
        """Write what the holder serves, from the newest step that it and all replicas here
        have; move newer checkpoints and states aside."""
        recipe, folder = self.assignment.recipe, self._holder_folder
        found = states(folder)
        state = next((one for one in found if self._all_have(one)), None)
        if state is None and (found or any(map(self._steps, self.numbers))):
            raise RunFailed(
                f"{self.run.path}: no step is in the checkpoints of all replicas and in "
                f"{folder}",
                fix="start in another directory (--run-dir OTHER), with model.init: checkpoint "
                "from one replica's",
            )
        if state is not None and self.settings.overlap == "none":
            for number in self.numbers:
                for step in self._steps(number):
                    if not self._is_of_round(state, number, step) and step > state.step:
                        self._set_aside(self._checkpoint(number, step), f"replica-{number}")
            for one in found:
                if one.step > state.step:
                    self._set_aside(one.path, "holder")
        expected = range(self.settings.replicas) if state is None else state.members
        Served(
            recipe.name,
            self.settings.model_dump(),
            self.holder,
            str(self.run.events),
            save_every=recipe.checkpoint.every_steps or recipe.total_steps() or 1,
            last=recipe.total_steps() or 0,
            keep=recipe.checkpoint.keep + 1,
            expected=sorted({*expected, *self.numbers}),
            step=None if state is None else state.step,
        ).write(folder)

    def _all_have(self, state: State) -> bool:
        """Whether every replica that took part and is here has a checkpoint of its round."""
        here = set(self.numbers) & set(state.members)
        return self.settings.overlap == "delayed" or all(
            any(self._is_of_round(state, number, step) for step in self._steps(number))
            for number in here
        )

    def _is_of_round(self, state: State, number: int, step: int) -> bool:
        """Whether a replica's checkpoint is of the round that began with the state."""
        inside = state.step <= step < state.step + self.settings.every_steps
        return inside or state.waiting.get(number) == step

    def _checkpoint(self, number: int, step: int) -> Path:
        store = CheckpointStore(RunDirectory(self.folder(number)).checkpoints, keep=1)
        return store.of_step(step)

    def _steps(self, number: int) -> list[int]:
        store = CheckpointStore(RunDirectory(self.folder(number)).checkpoints, keep=1)
        return [step_of(path) for path in store.finished()]

    def _set_aside(self, path: Path, owner: str) -> None:
        place = self.run.path / "set-aside" / str(int(time.time()))
        place.mkdir(parents=True, exist_ok=True)
        path.replace(place / f"{owner}-{path.name}")
        tell(f"{owner}: {path.name} is behind the step that all have, and moved to {place}")

    @contextmanager
    def _holder(self) -> Iterator["subprocess.Popen[bytes]"]:
        module = "toolkit.extras.outer.holder"
        with (self._holder_folder / "holder.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(self._holder_folder)],
                env={**os.environ},
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
        with _ended(process):
            yield process

    @contextmanager
    def _replica(
        self, number: int, devices: DeviceSlice
    ) -> Iterator["subprocess.Popen[bytes]"]:
        die = die_with_parent(signal.SIGTERM)

        def between_fork_and_exec() -> None:
            die()
            if devices.cores:
                os.sched_setaffinity(0, devices.cores)

        env = {**os.environ, **devices.env, STARTED: str(number)}
        if len(self.numbers) > 1 and not devices.cores:  # fewer cores than replicas
            env.setdefault("OMP_NUM_THREADS", "1")
        with self._log(number).open("ab") as log:
            shown = number == self.numbers[0]  # the terminal is for one of them
            process = subprocess.Popen(
                self.command(number),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=None if shown else log,
                stderr=None if shown else log,
                start_new_session=True,
                preexec_fn=between_fork_and_exec,
            )
        with _ended(process):
            yield process

    def _wait(self, signals: StopSignals, holder: "subprocess.Popen[bytes] | None") -> int:
        codes: dict[int, int] = {}
        stopping = False
        while len(codes) < len(self._running):
            if signals.stop_requested and not stopping:
                stopping = True
                tell(STOPPING)
                self._signal(signal.SIGTERM, holder)
            if signals.kill_requested:
                self._signal(signal.SIGKILL, holder)
            if holder is not None and holder.poll() is not None and not stopping:
                tell(f"error: the holder has ended; see {self._holder_folder / 'holder.log'}")
                stopping = True
                self._signal(signal.SIGTERM, None)
            for number, process in self._running.items():
                code = process.poll()
                if code is not None and number not in codes:
                    codes[number] = code
                    self._ended_replica(number, code)
                    if code in USER_CODES and not stopping and not self._has_round():
                        stopping = True
                        tell("a mistake before the first exchange: the others are stopped")
                        self._signal(signal.SIGTERM, holder)
            time.sleep(POLL_S)
        own = [EXIT_FAILED] if holder and holder.poll() not in (None, EXIT_DONE) else []
        return _exit_code([*codes.values(), *own])

    def _has_round(self) -> bool:
        """Whether an exchange has been done since the start, as far as is known here."""
        found = read_events(self.run.events, self._before)
        return any(one["kind"] == "outer" and "tokens" in one for one in found)

    def _signal(self, number: signal.Signals, holder: "subprocess.Popen[bytes] | None") -> None:
        """To the holder first: then no round ends without the replicas that stop."""
        for process in (*([holder] if holder else ()), *self._running.values()):
            if process.poll() is None:
                process.send_signal(number)

    def _ended_replica(self, number: int, code: int) -> None:
        if code not in (EXIT_DONE, EXIT_RESUMABLE):
            shown = number == self.numbers[0]
            place = "its message is above" if shown else f"see {self._log(number)}"
            tell(f"replica {number} has failed with exit code {code}: {place}")
            with suppress(RunFailed):
                leave_out(self.holder, self.assignment.recipe.name, number)


def require_port(holder: str) -> None:
    """Raises PlanError if a holder cannot be bound to this HOST:PORT."""
    try:
        socket.create_server(address(holder)).close()
    except OSError as error:
        raise PlanError(
            f"parallel.outer.holder: {holder}: {error.strerror or error}",
            fix="state another port, and an address of this machine",
        ) from error


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Ends a process behind the block: politely, then by force."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60.0)
        if process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _exit_code(codes: Sequence[int]) -> int:
    """Of all replicas: a mistake of the user's, a failure, a stop, or the end."""
    for code in (*USER_CODES, EXIT_FAILED, EXIT_RESUMABLE):
        if code in codes:
            return code
    return EXIT_DONE if set(codes) == {EXIT_DONE} else EXIT_FAILED


def instead(
    assignment: Assignment,
    settings: OuterSection,
    origin: Origin,
    cluster: str | None,
    changes: Sequence[str],
) -> Replicas | None:
    """What `dmt launch` starts; None for the launch of a replica itself.

    Raises PlanError where its launcher would not wait, or for what only DMT sets.
    """
    if STARTED in os.environ:
        return None
    stated = (origin.places() or {}).get("parallel.outer.whole_batch")
    if stated is not None and not RunDirectory(Path(stated).parent).plan.exists():
        raise PlanError(
            f"parallel.outer.whole_batch is stated in {stated}: only DMT sets it, in the "
            "recipes of run directories",
            fix="remove it; training.global_batch_size is the batch of all replicas",
        )
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
