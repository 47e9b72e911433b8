"""`dmt watch --terminal`: what it draws, that it follows a run, and how it is left."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.product import dmt
from tests.processes import HANG_S, wait_until
from tests.report.logs import HOSTILE, KILLED_AND_RESTARTED, event, metrics, write_run
from toolkit.cli.main import main
from toolkit.extras.page.dashboard import sparkline


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([5.0], 10) == "▁"


def test_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, as text; also of a run that crashed, with damaged files, on a copy."""
    ended = event(86, "end", exit_code=4, step=20, error=f"[bold]{HOSTILE}")
    run = write_run(tmp_path / "run", [*KILLED_AND_RESTARTED[:-1], ended], metrics(20, 2.0))
    (run / "plan.json").write_text("{")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert main(["watch", str(run), "--terminal"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "failed" in out and "20" in out and "█" in out
    assert "skipped step 15" in out and "[bold]</script>" in out and "plan.json" in out
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@contextmanager
def on_a_terminal(run: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    terminal, inside = pty.openpty()
    argv = dmt("watch", run, "--terminal")
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        argv, stdin=inside, stdout=inside, stderr=inside, env=env, start_new_session=True,
        # As a terminal starts it: without one, this process may have been told to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    os.close(inside)
    os.set_blocking(terminal, False)
    try:
        yield process, terminal
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["q", "Ctrl-C"])
def test_live(tmp_path: Path, leave: str) -> None:
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED[:3], metrics(12, 2.0))
    shown = b""

    with on_a_terminal(run) as (process, terminal):

        def shows(text: str) -> bool:
            nonlocal shown
            with suppress(OSError):  # nothing there, or not yet open
                shown += os.read(terminal, 1 << 20)
            assert process.poll() is None, shown
            return text in shown.decode(errors="replace")

        wait_until(lambda: shows("4.8800"), "the last loss")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(13, 2.0)[-1]) + "\n")
        wait_until(lambda: shows("4.8700"), "a new step")
        if leave == "q":
            os.write(terminal, b"q")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(HANG_S) == 0
