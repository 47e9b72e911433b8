"""`dmt rehearse` on real engines: every layout equals the reference, or the command says so."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.forked import ForkedRanks
from tests.processes import HANG_S, ROOT, wait_until
from tests.rehearse.bugs import BUG
from tests.rehearse.conftest import LLAMA
from toolkit.cli.main import main
from toolkit.rehearse import ranks
from toolkit.rehearse.comparison import Record
from toolkit.rehearse.rehearsal import Options


def test_nothing_compared_is_a_failure(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = Record((1.0,), (1.0,))
    monkeypatch.setattr("toolkit.rehearse.rehearsal.run_reference", lambda *_: nothing)
    options = ["--layouts", "megatron-ep2,*zero3", "--processes", "1", "--steps", "1"]
    assert main(["rehearse", str(LLAMA), *options, "--json"]) == 4
    out, err = capfd.readouterr()
    assert {entry["verdict"] for entry in json.loads(out)["layouts"]} == {"skipped"}
    assert "no layout was compared: every chosen one was skipped" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.usefixtures("warm_ranks")
def test_json_is_alone_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--layouts", "ddp,megatron-ep2,*zero3", "--processes", "2", "--steps", "2"]
    assert main(["rehearse", str(LLAMA), *options, "--json"]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out)
    assert set(found) == {"reference", "layouts"}
    assert [len(found["reference"][name]) for name in ("loss", "grad_norm")] == [2, 2]
    entries = {entry["name"]: entry for entry in found["layouts"]}
    assert list(entries) == ["ddp", "zero3", "megatron-ep2", "megatron-tp2-zero3"]
    ddp = entries["ddp"]
    assert (ddp["engine"], ddp["model"], ddp["world"]) == ("ddp", "hf", 2)
    assert ddp["layout"]["dp"] == 2
    assert ddp["verdict"] in ("exact", "within")
    assert ddp["loss"] == pytest.approx(found["reference"]["loss"], rel=1e-5)
    assert 0 <= ddp["max_rel_loss"] <= 1e-5
    assert entries["megatron-ep2"]["verdict"] == "skipped"
    assert "expert" in entries["megatron-ep2"]["why"]
    assert entries["megatron-ep2"]["loss"] == []
    four = entries["megatron-tp2-zero3"]
    assert four["why"] == "needs 4 processes, --processes is 2"
    assert "sequence_length 128 → 32" in err
    assert "fp32" in err


@pytest.mark.slow
def test_failed_layout_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    warm_ranks: Callable[[], Collection[psutil.Process]],
) -> None:
    monkeypatch.setenv(BUG, "failing")
    buggy = partial(Options, worker="tests.rehearse.bugs")
    monkeypatch.setattr("toolkit.cli.rehearse.Options", buggy)
    assert main(["rehearse", str(LLAMA), "--layouts", "ddp"]) == 4  # rank 0 sleeps for an hour
    out, err = capfd.readouterr()
    assert "diverged" in out
    assert "failed after step 1: RuntimeError: the disk is full" in out
    assert "Traceback" not in out
    assert "bugs.py" in err  # the end of the failed rank's log
    assert not warm_ranks()


@pytest.mark.slow
def test_hanging_layout_is_ended(tmp_path: Path) -> None:
    """On its own, with a limit that the reference of a rehearsal would have to keep, too."""
    spec = ranks.launch_spec(tmp_path, 2, ["-c", "import time; time.sleep(3600)"])
    failure = ranks.run_ranks(spec, limit_s=0.5)
    assert failure is not None
    assert failure.why == "no end after 0.5 s"
    assert not _ranks(os.getpid(), "time.sleep(3600)")


def interrupted() -> int:
    """The command, which a signal meets in logging's hooks, for one: these are Python code that
    runs in a fork, and what it raises is ignored."""
    os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
    return main(["rehearse", str(LLAMA), "--layouts", "ddp", "--steps", "1"])


@pytest.mark.slow
def test_a_signal_is_heard_in_a_fork(tmp_path: Path) -> None:
    ended = ForkedRanks(interrupted, (), 1, tmp_path, {"TMPDIR": str(tmp_path)})
    assert ended.end() == [130], ended.printed()
    assert "ignored" not in ended.printed()
    assert not list(tmp_path.glob("dmt-rehearse-*")), "its folder is left behind"


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)]
)
def test_no_rank_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "toolkit.cli.main", "rehearse", str(LLAMA)]
    running = subprocess.Popen(
        [*argv, "--layouts", "ddp", "--steps", "1000"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        wait_until(lambda: _ranks(running.pid), "a rank")
        ranks = _ranks(running.pid)
        running.send_signal(number)
        _, err = running.communicate(timeout=HANG_S)
        assert "Traceback" not in err
        _, alive = psutil.wait_procs(ranks, timeout=HANG_S)
        assert not alive
        if number != signal.SIGKILL:
            assert running.returncode == 130
            assert not list(tmp_path.iterdir()), "its folder is left behind"
    finally:
        running.kill()


def test_unknown_layout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", str(LLAMA), "--layouts", "zero2", "--layouts", "zerro*"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "--layouts\n      found    'zerro*'" in err
    assert "recipe, zero2, ddp" in err
    assert "megatron-tp2-pp2-sp" in err


def _ranks(pid: int, module: str = ".rehearse.") -> list[psutil.Process]:
    """Ranks among the processes that `pid` started, by the module that they run."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, FileNotFoundError):  # one that ends while listed
            if any(module in argument for argument in process.cmdline()):
                found.append(process)
    return found
