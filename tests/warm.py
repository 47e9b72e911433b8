"""`python -m MODULE …` and `python FILE …` without the seconds that imports take.

`WarmPython` stands for `subprocess.Popen` where that would start a Python. The server of
tests/forked.py, which has imported what a rank needs, forks a process with a pid, environment,
streams, process group and exit code of its own. What differs: variables that an import reads
have no effect.
"""

import atexit
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from io import TextIOWrapper
from multiprocessing import forkserver, reduction
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

import fsspec
import psutil

from tests.e2e import hooks, two_hosts
from tests.forked import PRELOADED, SERVER, take_environment
from tests.processes import ROOT, wait_until

REGISTER = "DMT_TEST_REGISTER"
"""Variable with a folder, in which each process that has it leaves a file: pid, start, RANK."""
STARTED_BY = (
    "toolkit.launchers.ranks",
    "toolkit.extras.tune.trial",
)
"""Modules of the product that start Python processes."""
ELASTIC = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
THEIR_LAUNCHERS = {
    "torchrun": (ELASTIC,),
    "accelerate": (ELASTIC, "accelerate.commands.launch"),
    "deepspeed": ("deepspeed.launcher.runner",),
    "deepspeed.launcher.launch": ("deepspeed.launcher.launch",),
}
"""Programs of others that start ranks, by the modules that do it."""
IMPORTED_WITH = os.environ.get("PYTHONPATH", "")
"""What a server that has imported this module began with."""
OTHER_SERVERS: dict[str, forkserver.ForkServer] = {}
"""Besides that of tests/forked.py, by their PYTHONPATH: packages on it were there when they
imported the toolkit, which asks for entry points."""


def new_server(preloaded: Sequence[str], python_path: str) -> forkserver.ForkServer:
    """A server that has imported these modules; it ends with this process."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*preloaded])
    paths = [*python_path.split(":"), *sys.path]  # some Pythons pass on this process's own
    with patch.dict(os.environ, PYTHONPATH=python_path), patch.object(sys, "path", paths):
        server.ensure_running()
    return server


def serve(python_path: str) -> None:
    """Let this process have a server with this PYTHONPATH."""
    if python_path not in OTHER_SERVERS:
        OTHER_SERVERS[python_path] = new_server(["tests.warm", *PRELOADED], python_path)


@contextmanager
def forking_from(server: forkserver.ForkServer) -> Iterator[None]:
    """Let multiprocessing fork from this server instead of that of tests/forked.py."""
    with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        yield


class _Descriptor:
    """A file descriptor on its way to a new process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return reduction.DupFd(self.number).detach, ()


class WarmPython:
    """What `subprocess.Popen([PYTHON, *options, program, …])` is, forked from the server."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: int | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
        process_group: int | None = None,
        preexec_fn: Callable[[], None] | None = None,
        **_others: object,
    ) -> None:
        """`preexec_fn`: what `die_with_parent(SIGKILL)` returned."""
        assert stdin == subprocess.DEVNULL
        self.stdout = None
        mine, theirs = os.pipe() if stdout == subprocess.PIPE else (None, None)
        out = theirs if theirs is not None else _number(stdout, 1)
        err = out if stderr == subprocess.STDOUT else _number(stderr, 2)
        groups = start_new_session, process_group is not None
        streams = _Descriptor(out), _Descriptor(err)
        parent = os.getpid() if preexec_fn is not None else None
        arguments = (list(argv[1:]), dict(env), cwd or Path.cwd(), streams, groups, parent)
        self._process = SERVER.Process(target=_python, args=arguments)
        server = OTHER_SERVERS.get(env.get("PYTHONPATH", ""))
        with forking_from(server) if server is not None else nullcontext():
            self._process.start()
        self.pid: int = self._process.pid
        if theirs is not None:
            os.close(theirs)
            self.stdout = TextIOWrapper(os.fdopen(mine, "rb"), errors="replace")
        if any(groups):
            wait_until(self._leads_a_group, "a process group")

    def _leads_a_group(self) -> bool:
        with suppress(ProcessLookupError):
            return os.getpgid(self.pid) == self.pid
        return True  # it has ended

    @property
    def returncode(self) -> int | None:
        """Of a process that `poll` or `wait` saw ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a warm python", timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    args: Sequence[str], *, env: Mapping[str, str], stderr: int | None = None, **_others: object
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` is, with text from both streams."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        errors = stderr if stderr == subprocess.STDOUT else err
        process = WarmPython(args, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=errors)
        code = process.wait()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(args, code, out.read(), err.read())


SUBPROCESS = SimpleNamespace(**vars(subprocess) | {"Popen": WarmPython, "run": run})
"""Stands for the module `subprocess` in those of STARTED_BY."""


def popen(args: Sequence[str], **options: Any) -> Any:
    """Stands for `subprocess.Popen` in THEIR_LAUNCHERS, which start other programs, too."""
    if Path(args[0]).name.startswith("python"):
        return WarmPython(args, **{"stdin": subprocess.DEVNULL} | options)
    return subprocess.Popen(args, **options)


def _number(stream: IO[Any] | int | None, inherited: int) -> int:
    if stream is None:
        return inherited
    if stream == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_WRONLY)
    return stream if isinstance(stream, int) else stream.fileno()


def registered(folder: Path) -> dict[psutil.Process, str]:
    """The processes that left a file in the folder and still run; the RANK of each, or ""."""
    found = {}
    for file in folder.iterdir():
        pid, began, rank = file.name.split("_")
        with suppress(psutil.Error):
            process = psutil.Process(int(pid))
            if str(process.create_time()) == began:
                found[process] = rank
    return found


def _python(
    argv: list[str],
    env: dict[str, str],
    cwd: Path,
    streams: tuple[int, int],
    groups: tuple[bool, bool],
    parent: int | None,
) -> None:
    """What a Python that was started with these arguments does."""
    if parent is not None:
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    take_environment(env)
    if host := env.get(two_hosts.HOST):
        two_hosts.enter(host)
    _read_variables()
    if REGISTER in env:
        me = psutil.Process()
        name = f"{me.pid}_{me.create_time()}_{env.get('RANK', '')}"
        (Path(env[REGISTER]) / name).touch()
    new_session, own_group = groups
    if new_session:
        os.setsid()
    elif own_group:
        os.setpgid(0, 0)
    for number, stream in zip(
        (0, 1, 2), (os.open(os.devnull, os.O_RDONLY), *streams), strict=True
    ):
        os.dup2(stream, number)
    os.chdir(cwd)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN if new_session else signal.SIG_DFL)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)  # as Python does by itself
    sys.stdout.reconfigure(line_buffering=True)
    for name in STARTED_BY:
        with suppress(Exception):  # what the command says about it, too
            __import__(name)
            sys.modules[name].subprocess = SUBPROCESS
    if hook := env.get(hooks.HOOK):
        getattr(hooks, hook)()
    program = next(word for word in argv if not word.startswith("-"))
    for name in THEIR_LAUNCHERS.get(Path(program).name, ()):
        theirs = SimpleNamespace(**vars(subprocess) | {"Popen": popen})
        vars(import_module(name)).update(subprocess=theirs, Popen=popen)
    code = _run(argv)
    for end in (threading._shutdown, atexit._run_exitfuncs, sys.stdout.flush, sys.stderr.flush):
        end()
    os._exit(code)


def _die_with(parent: int) -> None:
    """Be killed when another process ends."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(parent)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def _read_variables() -> None:
    """Do what Python and fsspec did with the environment when they were imported.

    Packages on PYTHONPATH may add to ours by entry points, which it reads when imported.
    """
    fsspec.config.conf.clear()
    fsspec.config.set_conf_env(fsspec.config.conf)
    python_path = os.environ.get("PYTHONPATH", "")
    new = [path for path in python_path.split(":") if path and path not in sys.path]
    sys.path[1:1] = new
    if {*new} - {str(ROOT)} and python_path != IMPORTED_WITH:
        for name in [name for name in sys.modules if name.partition(".")[0] == "toolkit"]:
            del sys.modules[name]


def _run(argv: list[str]) -> int:
    if argv[0] == "-u":
        del argv[0]
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does
        traceback.print_exc()
        return 1
    return 0
