"""Stand-ins for workers, whether they live, and launchers without the seconds of imports."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import SERVER, take_environment
from tests.processes import HANG_S

STAND_IN = Path(__file__).with_name("stand_in.py")


def alive(pid: int) -> bool:
    """Does the process exist and is it no zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return False


class WarmProcess:
    """A process that calls `target(*arguments)`, whose result is the exit code, in a process
    group of its own, as a shell's foreground job. What it starts are usual processes."""

    def __init__(self, said: Path, target: Callable[..., int], *arguments: Any) -> None:
        """`said`: the file of its standard error."""
        self._said = said
        environment = dict(os.environ)
        self._process = SERVER.Process(target=_run, args=(environment, said, target, arguments))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def said(self) -> str:
        """What it has printed on standard error until now."""
        return self._said.read_text() if self._said.exists() else ""

    def end(self) -> tuple[int, str]:
        """Wait for its end: exit code and standard error."""
        self._process.join(HANG_S)
        assert self._process.exitcode is not None, self.said()
        return self._process.exitcode, self.said()


def _run(
    environment: dict[str, str],
    said: Path,
    target: Callable[..., int],
    arguments: tuple[Any, ...],
) -> None:
    take_environment(environment)
    os.setpgid(0, 0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = target(*arguments)
    sys.stderr.flush()
    os._exit(code)
