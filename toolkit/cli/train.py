"""`dmt train`: what a launcher starts on every rank."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Run directory that `dmt launch` wrote.")
    ],
) -> None:
    """Run one rank of a run directory (launchers call this; people call `dmt launch`).

    Example: torchrun --nproc-per-node 2 -m toolkit.cli.main train runs/tiny-llama-bytes
    """
    from toolkit.engines.distributed import end_process
    from toolkit.train.worker import train_run_directory

    end_process(train_run_directory(run_dir))
