"""Real ranks without the seconds that imports take: forked from a server that has them.

Each is a process of its own, with its rank in the environment, as a launcher would start it.
"""

import atexit
import gc
import multiprocessing
import os
import pickle
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from fcntl import LOCK_EX, flock
from multiprocessing import connection, forkserver
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, TypeVar

import psutil
import torch
from torch.distributed import ProcessGroupGloo, distributed_c10d

from tests.processes import HANG_S, wait_until
from toolkit.backend import BACKENDS
from toolkit.engines.distributed import end_process, join, leave
from toolkit.launchers.base import free_port

Result = TypeVar("Result")

PRELOADED = (
    "toolkit.cli.launch",
    "toolkit.train.worker",
    "tests.preloaded",
    *(BACKENDS[name].engine.partition(":")[0] for name in BACKENDS.names),
)
"""Modules that a server has imported before it forks."""
SERVER = multiprocessing.get_context("forkserver")
"""One for each process that runs tests."""
SERVER.set_forkserver_preload([*PRELOADED])


class _LikeGloo(type(ProcessGroupGloo)):  # type: ignore[misc]
    """Whatever wrapper a group has: those of C++ know nothing of the class below."""

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, ProcessGroupGloo)


class _OneDevice(ProcessGroupGloo, metaclass=_LikeGloo):
    """Gloo on one device for all groups of a process.

    By itself, each of megatron-core's seventeen groups has one, with a thread that wakes a
    hundred times a second: with two tests beside each other, most of what the cores did.
    """

    device: ProcessGroupGloo.Device | None = None

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, **others: Any
    ) -> None:
        """`others`: options that torch passes since 2.14."""
        if _OneDevice.device is None:
            interface = os.environ.get("GLOO_SOCKET_IFNAME")
            if interface is None:
                _OneDevice.device = ProcessGroupGloo.create_default_device()
            else:
                _OneDevice.device = ProcessGroupGloo.create_device(interface=interface)
        options = ProcessGroupGloo._Options()
        options._devices, options._timeout = [_OneDevice.device], timeout
        for name, value in others.items():
            setattr(options, name, value)
        super().__init__(store, rank, size, options)


class ForkedRanks:
    """`world` processes that each call `target(*arguments)`, whose result is the exit code.

    `target` is a function of a module. Each rank works in `folder` and prints to a file there.
    """

    def __init__(
        self,
        target: Callable[..., int],
        arguments: Sequence[Any],
        world: int,
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        common = {
            **os.environ,
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self.outputs = [folder / f"rank-{rank}.out" for rank in range(world)]
        self._processes = []
        for rank, output in enumerate(self.outputs):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = SERVER.Process(
                target=_rank, args=(environment, folder, output, target, arguments)
            )
            process.start()
            self._processes.append(process)

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that are ready when a rank has ended."""
        return [process.sentinel for process in self._processes]

    @property
    def has_ended(self) -> bool:
        return not any(process.is_alive() for process in self._processes)

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks that run now."""
        return {
            rank: psutil.Process(process.pid)
            for rank, process in enumerate(self._processes)
            if process.is_alive()
        }

    def end(self) -> list[int | None]:
        """Wait for the end; exit codes. When a rank fails, the others are asked to stop."""
        asked = False

        def has_ended() -> bool:
            nonlocal asked
            if not asked and any(process.exitcode for process in self._processes):
                asked = True
                for process in self._processes:
                    process.terminate()
            return self.has_ended

        try:
            wait_until(has_ended, "the end of all ranks", self.printed)
        finally:
            self.kill()
        return [process.exitcode for process in self._processes]

    def kill(self) -> None:
        """Kill what is left."""
        for process in self._processes:
            process.kill()
            process.join()

    def printed(self) -> str:
        """What all ranks printed."""
        return "\n".join(path.read_text() for path in self.outputs if path.exists())


def run_ranks(
    target: Callable[..., Result],
    world: int,
    *arguments: Any,
    env: Mapping[str, str] | None = None,
) -> list[Result]:
    """Call `target(*arguments)` once per rank, each in a process; what each returned.

    Fails with the output of the first rank that failed.
    """
    with TemporaryDirectory(prefix="dmt-ranks-") as name, _room_for(world):
        folder = Path(name)
        ranks = ForkedRanks(_returned, (folder, target, arguments), world, folder, env)
        codes = ranks.end()
        # The rank that failed by itself comes before those that were ended because of it.
        for rank in sorted(range(world), key=lambda rank: (codes[rank] or 0) < 0):
            tail = ranks.outputs[rank].read_text()[-6000:]
            assert codes[rank] == 0, f"rank {rank} ended with {codes[rank]}:\n{tail}"
        return [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(world)]


@contextmanager
def _room_for(world: int) -> Iterator[None]:
    """Let no two groups of four ranks or more compute at once, of all that test here."""
    with Path(gettempdir(), f"dmt-four-ranks-{os.getuid()}").open("wb") as lock:
        if world >= 4:
            flock(lock, LOCK_EX)
        yield


class RankGroup:
    """Ranks that have joined a process group, and call one function after the other.

    What it costs to start them and to import what engines need is paid once.
    """

    def __init__(self, world: int) -> None:
        self._at_end = ExitStack()
        self._at_end.enter_context(_room_for(world))
        name = self._at_end.enter_context(TemporaryDirectory(prefix="dmt-ranks-"))
        ours, theirs = zip(*(multiprocessing.Pipe() for _ in range(world)), strict=True)
        self._pipes: tuple[connection.Connection, ...] = ours
        self._ranks = ForkedRanks(_serve, (theirs,), world, Path(name))
        for pipe in theirs:
            pipe.close()

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(ranks, *arguments)` on every rank; what each returned.

        Fails with the output of a rank that failed; the group has then ended.
        """
        try:
            return self._call(function, arguments)
        except BaseException:  # pytest's limit, too: a rank that hangs serves no other test
            self.end()
            raise

    def _call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results: dict[Any, Any] = {}
        sentinels = self._ranks.sentinels
        while missing := [pipe for pipe in self._pipes if pipe not in results]:
            ready = connection.wait([*missing, *sentinels], HANG_S)
            answered = [pipe for pipe in missing if pipe in ready and pipe.poll()]
            try:
                results |= {pipe: pipe.recv() for pipe in answered}
            except EOFError:
                answered = []
            if not answered:
                self._ranks.kill()
                printed = self._ranks.printed()
                raise AssertionError(f"a rank failed or hung:\n{printed[-6000:]}")
        return [results[pipe] for pipe in self._pipes]

    def end(self) -> None:
        """End all ranks."""
        self._ranks.kill()
        GROUPS.pop(len(self._pipes), None)
        self._at_end.close()


GROUPS: dict[int, RankGroup] = {}
"""Those of this process that wait for more to do, by their number of ranks."""


@atexit.register
def end_groups() -> None:
    """End all groups."""
    for group in list(GROUPS.values()):
        group.end()


def call_ranks(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Call `function(ranks, *arguments)` on `world` ranks, which stay for the next call if
    they are fewer than four; what each returned."""
    if world not in GROUPS:
        GROUPS[world] = RankGroup(world)
    try:
        return GROUPS[world].call(function, *arguments)
    finally:
        if world >= 4 and world in GROUPS:
            GROUPS[world].end()


def _serve(pipes: Sequence[connection.Connection]) -> int:
    """Be one rank of a `RankGroup`, until the process that has it is gone."""
    pipe = pipes[int(os.environ["RANK"])]
    ranks = join()
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            break
        pipe.send(function(ranks, *arguments))
        gc.collect()  # process groups of closed engines, each with a thread that polls
    leave()
    return 0


def _returned(folder: Path, target: Callable[..., Any], arguments: Sequence[Any]) -> int:
    """Keep what one rank returns."""
    (folder / os.environ["RANK"]).write_bytes(pickle.dumps(target(*arguments)))
    return 0


def take_environment(environment: Mapping[str, str]) -> None:
    """Let this forked process have these variables and no other."""
    distributed_c10d.ProcessGroupGloo = _OneDevice
    gc.freeze()  # what the server has imported stays: no collection need look at it
    weakref.finalize._registry.clear()  # nor need its end take back what torch has registered
    forkserver._forkserver.ensure_running = lambda: None  # this server, not another one
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:  # OpenMP has read it when the server loaded it
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))


def _rank(
    environment: dict[str, str],
    folder: Path,
    output: Path,
    target: Callable[..., int],
    arguments: Sequence[Any],
) -> None:
    os.chdir(folder)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    warnings.simplefilter("ignore", FutureWarning)
    take_environment(environment)
    code = 1
    try:
        code = target(*arguments)
    except BaseException:  # noqa: BLE001 - on its way to the test
        traceback.print_exc()
    end_process(code)
