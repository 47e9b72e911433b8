"""Ranks on GPUs that are not there, forked from a server that has imported what they need."""

import os
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from tests.forked import SERVER
from tests.processes import ROOT
from tests.warm import forking_from, new_server


@cache
def _server() -> ForkServer:
    return new_server(["tests.rehearse.on_fake_gpus"], str(ROOT))


def fork(target: Callable[..., None], *arguments: Any) -> tuple[int, str]:
    """Call a function of a module there; exit code, and what it printed."""
    with TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        process = SERVER.Process(target=_called, args=(printed, target, arguments))
        with forking_from(_server()):
            process.start()
        process.join()
        assert process.exitcode is not None
        return process.exitcode, printed.read_text()


def run(argv: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` is in `toolkit.rehearse.gpu.dress`."""
    run_dir, rank, output = argv[-3:]
    code, printed = fork(_rank, Path(run_dir), int(rank), Path(output))
    return subprocess.CompletedProcess(argv, code, printed)


SUBPROCESS = SimpleNamespace(**vars(subprocess) | {"run": run})
"""Stands for the module `subprocess` in `toolkit.rehearse.gpu.dress`."""


def _called(printed: Path, target: Callable[..., None], arguments: Sequence[Any]) -> None:
    descriptor = os.open(printed, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    target(*arguments)


def _rank(run_dir: Path, rank: int, output: Path) -> None:
    from toolkit.rehearse.gpu.__main__ import main

    main(run_dir, rank, output)
