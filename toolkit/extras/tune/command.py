"""`dmt tune`: a recipe's settings chosen by trials on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath
from toolkit.errors import PlanError
from toolkit.extras.tune.search_command import SearchOptions, search_recipe
from toolkit.extras.tune.throughput_command import (
    ThroughputRequest,
    list_layouts,
    tune_throughput,
)
from toolkit.text.terminal import survive_lost_output

Space = Annotated[
    Path | None,
    typer.Option(
        "--search",
        metavar="SPACE",
        help="Search hyperparameters: a YAML file that maps settings to ranges and choices.",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help="Layouts (12), or points of the space (30)."),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help="Measured steps of each layout, after 2 others (10)."),
]
HangSeconds = Annotated[
    float | None,
    typer.Option(min=1, help="A step that takes longer counts as hanging (300)."),
]
Parallel = Annotated[
    int | None,
    typer.Option(min=1, help="--search: trials at a time, each on its share of the devices."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="--search: of the points (0).")]
Prune = Annotated[
    bool | None,
    typer.Option(
        "--prune/--no-prune",
        help="--search: stop trials that are worse than others at the same step (ASHA).",
    ),
]
TuneDir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="DIR",
        help="Results and trials; default: runs/NAME-tune or runs/NAME-search.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Default: RECIPE.tuned.yaml.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="List the layouts; write and start nothing."),
]


def tune(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    search: Space = None,
    trials: Trials = None,
    steps: Steps = None,
    hang_seconds: HangSeconds = None,
    parallel: Parallel = None,
    seed: Seed = None,
    prune: Prune = None,
    folder: TuneDir = None,
    out: Out = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Choose a recipe's settings by trials on this machine, and write RECIPE.tuned.yaml.

    It measures a few steps in the planner's best layouts. `--search` trains points
    of a space of hyperparameters, and compares their losses. A trial that runs out of memory,
    fails or hangs is a result. The same command continues a tuning that was stopped or killed.

    Example: dmt tune recipes/tiny/llama-bytes.yaml --set parallel.engine=auto

    Example: dmt tune recipes/tiny/llama-bytes.yaml --search space.yaml --trials 30
    """
    survive_lost_output()
    mode = "dmt tune" if search is None else "--search"
    stated = {
        "--trials": trials, "--steps": steps, "--cluster": cluster, "--out": out,
        "--dry-run": dry_run or None, "--parallel": parallel, "--seed": seed, "--prune": prune,
        "--hang-seconds": hang_seconds, "--json": as_json or None,
    }  # fmt: skip
    for name, value in stated.items():
        if value is not None and name not in _OPTIONS[mode]:
            raise PlanError(f"{name} is no option of {mode}", fix="remove it: dmt tune --help")
    hang_s = hang_seconds or _HANG_S
    if search is None:
        of_layouts = ThroughputRequest(
            recipe, overrides, cluster, folder, trials or 12, steps or 10, hang_s
        )
        list_layouts(of_layouts, as_json) if dry_run else tune_throughput(
            of_layouts, out, as_json
        )
    else:
        options = SearchOptions(
            search, folder, out, trials or 30, parallel or 1, seed or 0, prune is not False,
            hang_s, as_json,
        )  # fmt: skip
        search_recipe(recipe, overrides, options)


_HANG_S = 300.0
_OF_TRIALS = ("--trials", "--out", "--hang-seconds", "--json")
_OPTIONS = {
    "dmt tune": (*_OF_TRIALS, "--steps", "--cluster", "--dry-run"),
    "--search": (*_OF_TRIALS, "--parallel", "--seed", "--prune"),
}
"""Of each mode, those that not all have."""
