"""`dmt train`: what a launcher starts on every rank."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import Overrides, RunDir
from toolkit.errors import Problem, RecipeError
from toolkit.system.interpreter import importing


def train(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR|RECIPE",
            help="Run directory that `dmt launch` wrote, or a recipe, which rank 0 plans.",
        ),
    ],
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    run_dir: RunDir = None,
) -> None:
    """Run one rank. Launchers call this; use `dmt launch` instead.

    Example: torchrun --nproc-per-node 2 -m toolkit.cli.main train runs/tiny-llama-bytes
    """
    with importing():
        from toolkit.engines.distributed import end_process
        from toolkit.train.worker import train_recipe, train_run_directory

    if not target.is_dir():
        end_process(train_recipe(target, overrides, run_dir))
    if overrides or run_dir is not None:
        found = "--set or --run-dir together with a run directory, whose recipe is final"
        fix = "`dmt train RECIPE --set …`, or `dmt launch RECIPE --set …`"
        raise RecipeError([Problem("dmt train", found, "a recipe with them", fix)])
    end_process(train_run_directory(target))
