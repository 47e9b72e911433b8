"""`dmt tune`: a recipe's settings chosen by trials on this machine."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.text import Text

from toolkit.cli.bars import count_progress
from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath
from toolkit.cli.output import Line, Table, columns, output
from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE, PlanError, RunFailed
from toolkit.extras.tune.search import HyperparameterSearch, Point, SearchRequest
from toolkit.extras.tune.space import load_space, overrides_of
from toolkit.extras.tune.throughput import Measurement, Tuning, fastest, measure, searched
from toolkit.extras.tune.trial import check_waits, starts_locally
from toolkit.extras.tune.tuned import (
    check_tuned_path,
    tuned_path,
    write_searched,
    write_tuned,
)
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.plan.dimensions import layout_text
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import check_local_files
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.text.terminal import survive_lost_output, tell
from toolkit.text.units import seconds, size

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
    typer.Option(min=1, max=10_000, help="Layouts (12), or points of --search (30)."),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help="Measured steps of each layout (10), after 2 others."),
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="With --search: random seed of its points (0).")
]
TuneDir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        metavar="DIR",
        help="Results and trials. Default: runs/NAME-tune or runs/NAME-search.",
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="Default: RECIPE.tuned.yaml.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="List the layouts; write and start nothing.")
]

_LONGEST_STEP_S = 300.0
"""A trial hangs when one step takes longer, unless launch.hang_timeout_s is less."""
_SHOWN = 10
"""Points of a search that are printed, the best ones."""
WORDS = {
    "done": ("measured", "green"),
    "stopped": ("given up", "dim"),
    "out_of_memory": ("out of memory", "red"),
    "hung": ("hung", "red"),
    "failed": ("failed", "red"),
}
"""Word and colour for the end of a trial, the best first."""


def tune(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    search: Space = None,
    trials: Trials = None,
    steps: Steps = None,
    seed: Seed = None,
    folder: TuneDir = None,
    out: Out = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Choose a recipe's settings by trials on this machine, and write RECIPE.tuned.yaml.

    Measures a few steps in the planner's best layouts. With `--search`, trains points of a
    space of hyperparameters and compares their losses. A trial that runs out of memory, fails
    or hangs is a result. The same command continues a tuning that was stopped or killed.

    Example: dmt tune recipes/tiny/llama-bytes.yaml --set parallel.engine=auto

    Example: dmt tune recipes/tiny/llama-bytes.yaml --search space.yaml --trials 30
    """
    survive_lost_output()
    stated = {"--cluster": cluster, "--dry-run": dry_run or None, "--steps": steps}
    if search is None:
        stated = {"--seed": seed}
    for option in (one for one, value in stated.items() if value is not None):
        why = "is no option of --search" if search else "is an option of --search only"
        raise PlanError(f"{option} {why}", fix="remove it")
    loaded = load_recipe(recipe, overrides, cluster)
    hang_s = min(_LONGEST_STEP_S, loaded.launch.hang_timeout_s)
    file = out or tuned_path(recipe)
    if search is not None:
        check_waits(loaded)
        request = SearchRequest(
            recipe, overrides, load_space(search, recipe, overrides),
            folder or Path("runs") / f"{loaded.name}-search", trials or 30,
            hang_s, seed or 0,
        )  # fmt: skip
        return _search(request, loaded, file, as_json)
    where = None if cluster is None else find_cluster(cluster)
    tuning = Tuning(
        recipe, overrides, *searched(loaded, where),
        folder or Path("runs") / f"{loaded.name}-tune", trials or 12, steps or 10, hang_s,
        [] if cluster is None else ["--cluster", cluster],
    )  # fmt: skip
    if dry_run:
        return _list_layouts(tuning, as_json)
    check_local_files(loaded, recipe, overrides)
    return _tune(tuning, where, file, as_json)


def _tune(tuning: Tuning, cluster: Cluster | None, file: Path, as_json: bool) -> None:
    """Measure, print and write the fastest layout."""
    check_tuned_path(file)
    tuning.folder.mkdir(parents=True, exist_ok=True)
    with claimed(RunDirectory(tuning.folder)):
        _measure(tuning)
        if best := fastest(tuning.read()):
            write_tuned(tuning, best, file, cluster)
    output(as_json, _machine_output(tuning, file), _lines(tuning, file), wrap=False)
    if best is None:
        logs = f"{tuning.folder}/trials/*/launch.log"
        raise RunFailed(
            "no layout could be measured", fix=f"read {logs}; the same command tries again"
        )


def _search(request: SearchRequest, recipe: Recipe, file: Path, as_json: bool) -> None:
    """Search, print and write what was found."""
    check_tuned_path(file, " --search")
    check_local_files(recipe, request.recipe, request.overrides)
    search = HyperparameterSearch(request)
    if search.rung is None:
        tell(
            "no trial is stopped early: that needs training.steps or tokens, and losses before "
            "the end (evaluation.every_steps, or logging.every_steps without validation)"
        )
    is_over = search.run()
    best = search.best()
    if best is not None:
        note = f"loss {best.loss:.4f}, trial {best.number}"
        chosen = overrides_of(best.settings)
        write_searched(request.recipe, [*request.overrides, *chosen], file, note)
        tell(f"{file} written: the settings of trial {best.number}")
    if not is_over:
        tell(f"{request.folder}: stopped; start the same command again to continue")
    data = {"best": best, "trials": sorted(search.points(), key=lambda one: one.number)}
    code = EXIT_DONE if is_over else EXIT_RESUMABLE
    output(as_json, data, _points(search), exit_code=code)
    if best is None:
        logs = f"{request.folder}/trials/*/launch.log"
        raise RunFailed("no trial came to its end", fix=f"the reasons are in {logs}")


def _points(search: HyperparameterSearch) -> Iterator[Text]:
    """How many trials ended how, and the best ones."""
    points, best = search.points(), search.best()
    endings = [one.ending for one in points]
    counts = ", ".join(f"{endings.count(one)} {one}" for one in dict.fromkeys(endings))
    yield Text(f"{len(points)} trials: {counts}", "bold")
    table: Table[Point] = Table(
        {
            "trial": lambda one: str(one.number),
            "ended": lambda one: one.ending,
            "steps": lambda one: f"{one.steps:,}",
            "loss": lambda one: "-" if one.loss is None else f"{one.loss:.4f}",
            "settings": lambda one: " ".join(overrides_of(one.settings)),
        },
        left=2,
    )
    yield from table.texts(
        points[:_SHOWN], lambda one: "bold" if one is points[0] and best else "", "  "
    )


def _list_layouts(tuning: Tuning, as_json: bool) -> None:
    """Print what would be measured if every prediction were right."""
    expected = tuning.expected()
    data = [
        {**one.pair._asdict(), "layout": one.layout.to_dict(), "predicted_s": one.step_s}
        for one in expected
    ]
    rows = [
        [str(number), layout_text(*one.pair, one.layout), seconds(one.step_s or 0.0),
         size(one.memory_gib)]
        for number, one in enumerate(expected)
    ]  # fmt: skip
    output(as_json, data, columns([["#", "layout", "predicted", "memory"], *rows], left=2))


def _measure(tuning: Tuning) -> None:
    """Measure with a bar, and a line per trial."""
    done = len(tuning.kept())
    if done:
        tell(f"{done} layouts were measured before, in {tuning.results}")
    if starts_locally(tuning.recipe):
        name = tuning.recipe.launch.launcher
        tell(f"launch.launcher: {name} hands its jobs over; the trials are started by local")
    total = min(tuning.trials, len(tuning.search.fitting))
    with count_progress(total) as update:
        update(completed=done)
        for one in measure(tuning):
            done += 1
            update(completed=done)
            time = "" if one.step_time_s is None else f", {seconds(one.step_time_s)} per step"
            why = f": {one.reason}" if one.reason else ""
            ending = one.ending.replace("_", " ")
            tell(f"{done} of {total}: trial {one.number}, {one.layout}: {ending}{time}{why}")


def _machine_output(tuning: Tuning, file: Path) -> dict[str, Any]:
    """Output of `--json`."""
    best = fastest(tuning.read())
    return {
        "recipe": str(tuning.path),
        "directory": str(tuning.folder),
        "considered": len(tuning.search.fitting),
        "best": best and asdict(best),
        "planned": tuning.planned,
        "tuned": str(file),
        "trials": [asdict(one) for one in _ranked(tuning)],
    }


def _ranked(tuning: Tuning) -> list[Measurement]:
    """The fastest first, then what was given up, then what did not run."""
    order = [*WORDS]
    return sorted(
        tuning.read(),
        key=lambda one: (order.index(one.ending), one.step_time_s or 0.0, one.number),
    )


_LAYOUTS: Table[Measurement] = Table(
    {
        "#": lambda one: str(one.number),
        "layout": lambda one: one.layout,
        "measured": lambda one: seconds(one.step_time_s) if one.step_time_s else "-",
        "predicted": lambda one: seconds(one.predicted_s),
        "tokens/s": lambda one: f"{one.tokens_per_s:,.0f}" if one.measured else "-",
        "outcome": lambda one: WORDS[one.ending][0] + (f": {one.reason}" if one.reason else ""),
    },
    left=2,
)


def _lines(tuning: Tuning, file: Path) -> Iterator[Line]:
    """The table, and what to do with it."""
    ranked = _ranked(tuning)
    best = fastest(ranked)
    for row, line in _LAYOUTS.coloured(ranked, lambda one: WORDS[one.ending]):
        yield Text(line.plain, "bold green") if best and row is best else line
    if best is None:
        return
    planned = next((one for one in ranked if one.layout == tuning.planned), best)
    gain = ""
    if planned is best:
        gain = ", the planner's choice" if best.layout == tuning.planned else ""
    elif planned.measured and planned.step_time_s and best.step_time_s:
        times = planned.step_time_s / best.step_time_s
        gain = f", {times:.2f} × as fast as the planner's choice"
    yield ""
    yield f"fastest: {best.layout}{gain}"
    yield f"wrote {file}: dmt launch {quote(str(file))}"
    yield f"trials are in {tuning.folder}/trials"
