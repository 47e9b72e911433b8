"""`dmt train`: what a launcher starts on every rank."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import EXIT_DONE


def train(
    run_dir: Annotated[Path, typer.Argument(help="Run directory that `dmt launch` wrote.")],
) -> None:
    """Run one rank of a run directory (launchers call this; people call `dmt launch`).

    Example: torchrun --nproc-per-node 2 -m toolkit.cli.main train runs/tiny-llama-bytes
    """
    from toolkit.train.worker import train_run_directory

    code = train_run_directory(run_dir)
    if code != EXIT_DONE:
        # Threads of an unfinished collective must not keep a failed rank alive.
        sys.stdout.flush()
        os._exit(code)
