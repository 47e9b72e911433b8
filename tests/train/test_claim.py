"""One run per directory: the lock of a process that lives, dies or leaves a child behind."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import RECIPE
from tests.processes import HANG_S, ROOT
from toolkit.errors import DirectoryInUse
from toolkit.intake.load import load_recipe
from toolkit.run.assignment import decide, write
from toolkit.run.claim import claim, refuse_if_claimed
from toolkit.run.directory import RunDirectory

_CLAIM = """
import os, sys, time
from pathlib import Path
from toolkit.errors import DirectoryInUse
from toolkit.run.claim import claim
from toolkit.run.directory import RunDirectory

try:
    claim(RunDirectory(Path(sys.argv[1])))
except DirectoryInUse as error:
    sys.exit(str(error))
print("claimed", flush=True)
if sys.argv[2] == "forking" and os.fork() == 0:
    other = os.open(os.devnull, os.O_RDONLY)  # has the number of the lock
    if (grandchild := os.fork()) == 0:
        os.fstat(other)
        os._exit(0)
    assert os.waitpid(grandchild, 0)[1] == 0
    print(os.getpid(), flush=True)
if sys.argv[2] != "leaving":
    time.sleep(60)
"""
Claimant = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def claimant(tmp_path: Path) -> Iterator[Claimant]:
    """Starts processes that claim `tmp_path`."""
    processes = []

    def start(does: str = "staying") -> "subprocess.Popen[str]":
        argv = [sys.executable, "-c", _CLAIM, str(tmp_path), does]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(argv, cwd=ROOT, text=True, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def refuse(path: Path) -> None:
    refuse_if_claimed(RunDirectory(path))


def wait_until_claimed(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"


def test_a_second_run_is_refused_and_told_who_the_first_is(tmp_path, claimant):
    first = claimant()
    wait_until_claimed(first)
    refused = claimant()
    _, errors = refused.communicate(timeout=HANG_S)
    assert refused.returncode == 1
    with pytest.raises(DirectoryInUse) as refusal_of_a_look:
        refuse(tmp_path)
    for refusal in (errors, str(refusal_of_a_look.value)):
        assert f"{tmp_path} belongs to a run that is still running" in refusal
        assert f"process {first.pid} on {socket.gethostname()}, since 20" in refusal
        assert f"kill -TERM {first.pid}" in refusal
        assert "or --run-dir OTHER" in refusal
    assert DirectoryInUse.exit_code == 2


@pytest.mark.parametrize("does", ["staying", "forking"])
def test_a_killed_run_leaves_no_lock(tmp_path, claimant, does):
    first = claimant(does)
    wait_until_claimed(first)
    child = int(first.stdout.readline()) if does == "forking" else None
    first.kill()
    first.wait()
    try:
        refuse(tmp_path)
        wait_until_claimed(claimant("leaving"))
    finally:
        if child is not None:
            os.kill(child, 9)


def test_looking_neither_writes_nor_blocks(tmp_path):
    refuse(tmp_path)
    assert not list(tmp_path.iterdir())
    with RunDirectory(tmp_path).lock.open("w") as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        refuse(tmp_path)


def test_a_running_runs_files_are_not_replaced(tmp_path, claimant):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    wait_until_claimed(claimant())
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    with pytest.raises(DirectoryInUse):
        write(decide(load_recipe(file), tmp_path), ["dmt"])
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys, number):
    def flock(_descriptor: int, _kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    claim(RunDirectory(tmp_path))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the run directory's file system knows no locks")
    refuse(tmp_path)
    assert capsys.readouterr().err == "", "told once"
