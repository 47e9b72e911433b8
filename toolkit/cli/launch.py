"""`dmt launch`: plan a recipe, write its run directory, start the workers, wait."""

import sys
import time
from typing import Annotated

import typer

from toolkit.cli.options import ClusterOption, Overrides, RecipePath, RunDir
from toolkit.intake.load import load_recipe
from toolkit.launcher import LAUNCHERS, listed
from toolkit.launchers.launching import Origin, launch_recipe
from toolkit.run.events import process_age_s
from toolkit.text.terminal import survive_lost_output, tell

Changes = Annotated[
    list[str],
    typer.Option(
        "--change",
        metavar="KEY=VALUE",
        help="Continue the run with another learning rate, weight decay, gradient clipping or "
        "schedule; its optimizer states are kept, and the change is recorded.",
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Start a run that failed again from its last checkpoint, up to N times in a row "
        "without a new checkpoint; default: the recipe's launch.max_restarts (0)",
    ),
]


def launch(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    run_dir: RunDir = None,
    launcher: Annotated[
        str | None,
        typer.Option(help=f"{listed(LAUNCHERS.names)}; default: the recipe's launch.launcher"),
    ] = None,
    max_restarts: MaxRestarts = None,
    change: Changes = [],  # noqa: B006
    cluster: ClusterOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan and command; write and start nothing.")
    ] = False,
) -> None:
    """Train a recipe: on this machine, on several, or as a job of a scheduler.

    Example: dmt launch recipes/tiny/llama-bytes.yaml --set training.steps=20

    Example: dmt launch recipes/llama/llama-3.1-8b-pretrain.yaml --launcher slurm --dry-run
    """
    survive_lost_output()
    if launcher is not None:
        overrides = [*overrides, f"launch.launcher={launcher}"]
    if max_restarts is not None:
        overrides = [*overrides, f"launch.max_restarts={max_restarts}"]
    overrides = [*overrides, *change]
    origin = Origin(recipe, overrides, ["dmt", *sys.argv[1:]], time.time() - process_age_s())
    result = launch_recipe(
        load_recipe(recipe, overrides, cluster),
        run_dir,
        cluster,
        dry_run=dry_run,
        check=False,
        changes=[one.partition("=")[0] for one in change],
        origin=origin,
    )
    if dry_run:
        tell(result.command, sys.stdout)
    raise typer.Exit(result.exit_code)
