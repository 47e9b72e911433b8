"""The product as its users run it: real commands with a time limit and no leftovers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil

from tests.processes import ROOT, wait_until
from tests.warm import REGISTER, THEIR_LAUNCHERS, WarmPython, registered

_MARK = "DMT_TEST_COMMAND"
_WARM_VARIABLES = re.compile(
    r"DMT_CACHE|DMT_FAILPOINTS|DMT_TEST_\w+|REPLICA_GROUP_ID|PYTHONPATH|PATH|SLURM_CONF|CFLAGS|CXX|(WANDB|AWS|FSSPEC|HF)_\w+|"
    r"GLOO_SOCKET_IFNAME|OMP_NUM_THREADS|"
    r"\w+_(PASS|PASSWORD|PAT|KEY)"
)
"""What a warm process may find in its environment: what it reads, or tests/warm.py for it."""
_MOMENT_S = 30.0
"""How long a service may take to notice that its parent is gone."""
_USERS_OWN = (
    "WANDB_",
    "DMT_",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
    "OMP_NUM_THREADS",
)


def dmt(verb: str, *arguments: str | Path) -> list[str]:
    """`dmt VERB …` with this Python."""
    return [sys.executable, "-m", "toolkit.cli.main", verb, *map(str, arguments)]


def tool(name: str, *arguments: str | Path) -> list[str]:
    """A program that was installed beside this Python: `torchrun`, `deepspeed`."""
    return [str(Path(sys.executable).with_name(name)), *map(str, arguments)]


def settings(changes: Mapping[str, object]) -> list[str]:
    """`--set KEY=VALUE` for each change."""
    return [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


@dataclass(frozen=True)
class Ended:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


def succeeded(ended: Ended) -> str:
    """What a command printed that must have succeeded."""
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err
    return ended.out


def can_be_warm(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    """Is a command a Python that starts no launcher unknown to tests/warm.py, in nearly our
    environment?"""
    python = Path(argv[0]).name in (Path(sys.executable).name, "python", *THEIR_LAUNCHERS)
    launchers = [after for word, after in pairwise(argv) if word == "--launcher"]
    hides = any(
        Path(folder, "sitecustomize.py").exists()
        for folder in env.get("PYTHONPATH", "").split(":")
    )
    known = all(_WARM_VARIABLES.fullmatch(name) for name in env)
    return python and set(launchers) <= {"local", "slurm"} and known and not hides


class Command:
    """One running command: the foreground job of a shell, in its own process group.

    Where that is possible it is warm (tests/warm.py).
    """

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._register = folder / f".{self._mark}.register"
        self._register.mkdir()
        marks = {_MARK: self._mark, REGISTER: str(self._register)}
        start: Any = subprocess.Popen
        if can_be_warm(argv, env or {}):
            start = WarmPython
            if Path(argv[0]).name in THEIR_LAUNCHERS:
                argv = [sys.executable, *argv]
        self._outputs = [folder / f".{self._mark}.{name}" for name in ("out", "err")]
        with self._outputs[0].open("wb") as out, self._outputs[1].open("wb") as err:
            self.process = start(
                argv,
                cwd=folder,
                env={**_clean_environment(), **(env or {}), **marks},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                process_group=0,
            )

    def alive(self) -> list[psutil.Process]:
        """Every process that inherited this command's mark, oldest first."""
        found = {process for process in psutil.process_iter() if self._is_mine(process)}
        found |= registered(self._register).keys()
        return sorted(found, key=lambda process: process.create_time())

    def _is_mine(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return (
                process.environ().get(_MARK) == self._mark
                and process.status() != psutil.STATUS_ZOMBIE
            )
        return False

    def ranks(self) -> dict[int, psutil.Process]:
        """The workers that run now, by rank."""
        warm = registered(self._register).items()
        found = {int(rank): process for process, rank in warm if rank}
        for process in self.alive():
            with suppress(psutil.Error, KeyError):
                # What a worker starts comes later and does not replace it.
                found.setdefault(int(process.environ()["RANK"]), process)
        return found

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until `condition` holds; fails when the command ends before that."""

        def holds() -> bool:
            if condition():
                return True
            assert self.process.poll() is None, f"ended before {what}:\n{self.printed()}"
            return False

        wait_until(holds, what, self.printed)

    def printed(self) -> str:
        """Standard error until now."""
        return self._outputs[1].read_text(errors="replace")

    def interrupt(self) -> None:
        """Press Ctrl-C: SIGINT to the process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate_in_step(self, step: int) -> None:
        """SIGTERM to rank 0, which a failpoint has stopped in this step and which goes on."""

        def waits() -> bool:
            rank = self.ranks().get(0)
            return rank is not None and rank.status() == psutil.STATUS_STOPPED

        self.wait_for(waits, f"step {step}")
        rank = self.ranks()[0]
        rank.send_signal(signal.SIGTERM)
        rank.resume()

    def end(self, code: int | None = None) -> Ended:
        """Wait for the end; assert its exit code, if one is given, and that no process of this
        command outlives it.

        A service that looks for its parent every now and then has a moment to notice.
        """
        wait_until(lambda: self.process.poll() is not None, "the end", self.printed)
        out, err = (path.read_text(errors="replace") for path in self._outputs)
        moment = time.monotonic() + _MOMENT_S
        while (left := self.alive()) and time.monotonic() < moment:
            time.sleep(0.1)
        assert not left, f"left behind: {left}"
        ended = Ended(self.process.returncode, out, err)
        assert code in (None, ended.code), err
        return ended

    def kill(self) -> None:
        """Kill whatever is left of it."""
        for process in self.alive():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait()
        rmtree(self._register)
        for path in self._outputs:
            path.unlink(missing_ok=True)


@contextmanager
def started(
    argv: Sequence[str],
    folder: Path,
    env: Mapping[str, str] | None = None,
) -> Iterator[Command]:
    """Start a command in `folder`; kill what is left of it at the end of the block."""
    command = Command(argv, folder, env)
    try:
        yield command
    finally:
        command.kill()


def run(
    argv: Sequence[str],
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    code: int | None = None,
) -> Ended:
    """Run a command to its end; `code`: see `Command.end`."""
    with started(argv, folder, env) as command:
        return command.end(code)


def _clean_environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_USERS_OWN)}
    return kept | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl or events.jsonl; a line that is being written is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def steps_logged(run_dir: Path) -> int:
    """The last step in metrics.jsonl; 0 when there is none."""
    metrics = records(run_dir / "metrics.jsonl")
    return int(metrics[-1]["step"]) if metrics else 0


def curve(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; fails when a step is logged twice."""
    metrics = records(run_dir / "metrics.jsonl")
    found = {m["step"]: (m["loss"], m["grad_norm"]) for m in metrics}
    assert len(found) == len(metrics), "a step is logged twice"
    return found


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [event for event in records(run_dir / "events.jsonl") if event["kind"] == kind]


def checkpoints(run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    folders = (run_dir / "checkpoints").glob("step-????????/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in folders)


def assert_saved_and_stopped(ended: Ended, run_dir: Path) -> None:
    """A signal ended the run in good order, and the user reads how to go on."""
    assert ended.code == 75, ended.err
    last = steps_logged(run_dir)
    assert checkpoints(run_dir) == [last], "saved at the step where it stopped"
    assert f"stopped by a signal after saving step {last} of" in ended.err
    assert ended.err.count("fix: start the same command again to resume") == 1
    assert "Traceback" not in ended.err
    assert events(run_dir, "end")[-1]["exit_code"] == 75
    assert not (run_dir / "export").exists()
