"""`dmt launch`: plan a recipe, write its run directory, start the workers, wait."""

import sys
import time
from typing import Annotated

import typer

from toolkit.cli.options import ClusterOption, Overrides, RecipePath, RunDir
from toolkit.intake.load import load_recipe
from toolkit.launchers import LAUNCHERS, listed
from toolkit.launchers.launching import Origin, launch_recipe
from toolkit.run.events import process_age_s
from toolkit.text.terminal import survive_lost_output, tell

Changes = Annotated[
    list[str],
    typer.Option(
        "--change",
        metavar="KEY=VALUE",
        help="Resume with another learning rate, weight decay, clipping or schedule.",
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Restart a failed run from its last checkpoint, N times in a row at most. "
        "Default: launch.max_restarts (0).",
    ),
]


def launch(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    run_dir: RunDir = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Who starts the ranks: {listed([*LAUNCHERS])}. "
            "Default: launch.launcher (local).",
        ),
    ] = None,
    max_restarts: MaxRestarts = None,
    change: Changes = [],  # noqa: B006
    cluster: ClusterOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print plan and command; write and start nothing.")
    ] = False,
) -> None:
    """Train a recipe: on this machine, on several, or as a job of a scheduler.

    Ctrl-C saves and stops. The same command continues.

    Example: `dmt launch llama-bytes --set training.steps=20`

    Example: `dmt launch llama-3.1-8b-pretrain --launcher slurm --dry-run`
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
