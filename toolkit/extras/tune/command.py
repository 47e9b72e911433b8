"""`dmt tune`: a recipe's settings chosen by trials on this machine."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath
from toolkit.errors import PlanError
from toolkit.text.terminal import survive_lost_output

Chosen = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE…]", hidden=True, help="Of --agent.")
]
Throughput = Annotated[
    bool, typer.Option("--throughput", help="Measure layouts, and keep the fastest.")
]
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
    typer.Option(
        min=1, max=10_000, help="--throughput: measured steps of each, after 2 others (10)."
    ),
]
HangSeconds = Annotated[
    float, typer.Option(min=1, help="A step that takes longer counts as hanging.")
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
Transfer = Annotated[
    Literal["mup", "step-law"] | None,
    typer.Option(
        help="--search: search narrower models, and estimate the learning rate by this law."
    ),
]
Sweep = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="--search: only write it as a sweep, for `wandb sweep FILE`."
    ),
]
Agent = Annotated[bool, typer.Option("--agent", help="One trial of a W&B agent (see --sweep).")]
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
    typer.Option("--dry-run", help="--throughput: list the layouts; write and start nothing."),
]


def tune(
    recipe: RecipePath,
    chosen: Chosen = None,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    throughput: Throughput = False,
    search: Space = None,
    trials: Trials = None,
    steps: Steps = None,
    hang_seconds: HangSeconds = 300,
    parallel: Parallel = None,
    seed: Seed = None,
    prune: Prune = None,
    transfer: Transfer = None,
    sweep: Sweep = None,
    agent: Agent = False,
    folder: TuneDir = None,
    out: Out = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Choose a recipe's settings by trials on this machine, and write RECIPE.tuned.yaml.

    `--throughput` measures a few steps in the planner's best layouts. `--search` trains points
    of a space of hyperparameters, and compares their losses. A trial that runs out of memory,
    fails or hangs is a result. The same command continues a tuning that was stopped or killed.

    Example: dmt tune recipes/tiny/llama-bytes.yaml --set parallel.engine=auto --throughput

    Example: dmt tune recipes/tiny/llama-bytes.yaml --search space.yaml --trials 30
    """
    survive_lost_output()
    of_search = {
        "--parallel": parallel, "--seed": seed, "--prune": prune, "--transfer": transfer,
        "--sweep": sweep,
    }  # fmt: skip
    of_throughput = {"--steps": steps, "--cluster": cluster, "--dry-run": dry_run or None}
    if throughput + (search is not None) + agent != 1:
        fix = "add --throughput, or --search SPACE.yaml (docs/tuning.md)"
        raise PlanError("dmt tune: one of --throughput and --search is needed", fix=fix)
    if throughput:
        _require_unused("--throughput", {**of_search, "KEY=VALUE": chosen or None})
        from toolkit.extras.tune import throughput_command as of_layouts

        request = of_layouts.ThroughputRequest(
            recipe, overrides, cluster, folder, trials or 12, steps or 10, hang_seconds
        )
        if dry_run:
            of_layouts.list_layouts(request, as_json)
        else:
            of_layouts.tune_throughput(request, out, as_json)
        return
    _require_unused("--search", of_throughput)
    from toolkit.extras.tune import search_command

    if search is None:
        _require_unused("--agent", {**of_search, "--trials": trials, "--out": out})
        search_command.run_agent(recipe, overrides, chosen or (), folder)
        return
    _require_unused("--search", {"KEY=VALUE": chosen or None})
    if sweep is not None:
        _require_unused(
            "--sweep",
            {"--transfer": transfer, "--out": out, "--parallel": parallel, "--seed": seed},
        )
    options = search_command.SearchOptions(
        search, folder, out, trials or 30, parallel or 1, seed or 0, prune is not False,
        hang_seconds, sweep, transfer, as_json,
    )  # fmt: skip
    search_command.search_recipe(recipe, overrides, options)


def _require_unused(mode: str, options: dict[str, Any]) -> None:
    """Raises PlanError for an option that this mode does not have."""
    for name, value in options.items():
        if value is not None:
            raise PlanError(f"{name} is no option of {mode}", fix="remove it: dmt tune --help")
