"""Evaluates exported weights in a process of its own; exports a checkpoint for that."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from toolkit.checkpoint.export import export, exported_bytes
from toolkit.checkpoint.manifest import Manifest
from toolkit.errors import EXIT_UNAVAILABLE, BackendUnavailable, DataError, RunFailed
from toolkit.evaluate.process import Findings, Request
from toolkit.evaluator import EvaluatorSection
from toolkit.models.new_folder import check_destination
from toolkit.system.interpreter import python

_POLL_S = 0.1
_STDERR = 2
_RANKS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_",
    "ACCELERATE_", "OMPI_", "PMI", "MV2_", "SLURM_",
)  # fmt: skip
"""How variables begin that make a process a rank: accelerate would wait for the others."""


@contextmanager
def exported(
    checkpoint: Path, dst: Path, tick: Callable[[int], None] = lambda _: None
) -> Iterator[Path]:
    """The whole model of a checkpoint, adapters merged, in the folder `dst`, which is removed
    at the end, and at the beginning if a kill has left it there.

    Raises DataError without room on the disk, and as `export` does.
    """
    shutil.rmtree(dst, ignore_errors=True)
    try:
        merged = Manifest.read(checkpoint).adapter is not None
        check_destination(checkpoint, dst, exported_bytes(checkpoint, merged=merged))
        export(checkpoint, dst, tick, merged=merged)
        yield dst
    finally:
        shutil.rmtree(dst, ignore_errors=True)


def evaluate(
    folder: Path,
    settings: Mapping[str, EvaluatorSection],
    device: str,
    *,
    prepare: bool = False,
    log: Path | None = None,
    limit_s: float | None = None,
    mark: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The findings of each evaluator about the model in `folder`; with `prepare`, nothing but
    the errors that are known without weights.

    `log` gets what the process prints, otherwise standard error; `mark` is called while it
    runs. Raises DataError or BackendUnavailable for what it lacks, RunFailed if it fails, or
    prints nothing into its log for `limit_s` seconds.
    """
    with TemporaryDirectory() as name:
        out = Path(name) / "answer.json"
        stated = {key: one.model_dump(mode="json") for key, one in settings.items()}
        request = Request(str(folder), stated, device, prepare, str(out), os.getpid())
        with _output(log) as file, _started(request, file) as process:
            quiet = _Quiet(log, limit_s)
            while process.poll() is None:
                mark()
                quiet.check()
                time.sleep(_POLL_S)
        if not out.is_file():
            where = f"; see {log}" if log else ""
            raise RunFailed(f"its process ended with exit code {process.returncode}{where}")
        answer = Findings(**json.loads(out.read_text(encoding="utf-8")))
    if answer.exit_code == EXIT_UNAVAILABLE:
        raise BackendUnavailable(answer.error, fix=answer.fix)
    if answer.error:
        kind = DataError if answer.fix else RunFailed
        raise kind(answer.error, fix=answer.fix)
    return answer.findings


@contextmanager
def _output(log: Path | None) -> Iterator[IO[Any] | int]:
    if log is None:
        yield _STDERR
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        yield file


@contextmanager
def _started(request: Request, output: IO[Any] | int) -> Iterator[subprocess.Popen[bytes]]:
    """The running process; nothing that it started is left at the end."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(_RANKS)}
    kept["TOKENIZERS_PARALLELISM"] = "false"  # as the harness's command line
    if request.device == "cpu":
        kept["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        [*python(), "-m", "toolkit.evaluate.process"],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=kept,
        start_new_session=True,  # a Ctrl-C at the terminal is for the run
    )
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            process.stdin.close()
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class _Quiet:
    """Notices a process that prints nothing any more: tasks show a bar while they run."""

    def __init__(self, log: Path | None, limit_s: float | None) -> None:
        self._log, self._limit_s = log, limit_s
        self._size, self._since = -1, time.monotonic()

    def check(self) -> None:
        """Raise RunFailed after the limit."""
        if self._log is None or self._limit_s is None:
            return
        size = self._log.stat().st_size
        if size != self._size:
            self._size, self._since = size, time.monotonic()
        elif time.monotonic() - self._since > self._limit_s:
            raise RunFailed(f"it printed nothing for {self._limit_s:g} s; see {self._log}")
