"""`dmt tune`: trains parts of a recipe's run on this machine to choose its settings."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath
from toolkit.errors import PlanError
from toolkit.extras.tune.throughput_command import (
    ThroughputRequest,
    list_layouts,
    tune_throughput,
)

Throughput = Annotated[
    bool, typer.Option("--throughput", help="Measure layouts, and keep the fastest.")
]
Trials = Annotated[int, typer.Option(min=1, max=1000, help="Layouts to measure.")]
Steps = Annotated[
    int, typer.Option(min=1, max=10_000, help="Measured steps of each, after 2 others.")
]
HangSeconds = Annotated[
    float, typer.Option(min=1, help="A step that takes longer counts as hanging.")
]
Folder = Annotated[
    Path | None, typer.Option("--dir", metavar="DIR", help="Default: runs/NAME-tune.")
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Default: RECIPE.tuned.yaml.")
]


def tune(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    throughput: Throughput = False,
    trials: Trials = 12,
    steps: Steps = 10,
    hang_seconds: HangSeconds = 300,
    folder: Folder = None,
    out: Out = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the layouts; write and start nothing.")
    ] = False,
) -> None:
    """Find the fastest layout of a recipe on this machine by training a few steps in each.

    The best predicted layout of every strategy is measured, then those that differ little from
    the fastest. A layout that runs out of memory, fails or hangs is a result. The same command
    continues a tuning that was stopped or killed.

    Example: dmt tune recipes/tiny/llama-bytes.yaml --set parallel.engine=auto --throughput
    """
    if not throughput:
        raise PlanError("dmt tune: nothing is asked for", fix="add --throughput")
    request = ThroughputRequest(recipe, overrides, cluster, folder, trials, steps, hang_seconds)
    if dry_run:
        list_layouts(request, as_json)
    else:
        tune_throughput(request, out, as_json)
