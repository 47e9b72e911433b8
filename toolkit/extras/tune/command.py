"""`dmt tune`: a recipe's settings chosen by trials on this machine."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from rich.text import Text

from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath, refuse_useless
from toolkit.cli.output import Line, Table, output
from toolkit.cli.progress import progress
from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed
from toolkit.extras.tune.layouts import LayoutStudy, named, searched
from toolkit.extras.tune.search import SearchStudy
from toolkit.extras.tune.space import load_space
from toolkit.extras.tune.study import Study, TrialRecord, TuneRequest, make_folder
from toolkit.extras.tune.trial import check_waits, starts_locally
from toolkit.extras.tune.tuned import (
    check_tuned_path,
    tuned_path,
    write_searched,
    write_tuned,
)
from toolkit.intake.load import load_recipe
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.run.assignment import check_local_files
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.text.terminal import survive_lost_output, tell

SpaceFile = Annotated[
    Path | None,
    typer.Option(
        "--search",
        metavar="SPACE",
        help="Search hyperparameters: a YAML file of lines like `optimizer.learning_rate: "
        "{low: 1.0e-4, high: 1.0e-2, log: true}` or `optimizer.weight_decay: [0.0, 0.1]`.",
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

_LONGEST_STEP_S = 300.0
"""A trial hangs when one step takes longer than this, or than a shorter
launch.hang_timeout_s."""
_STYLES = {"done": "", "stopped": "dim"}
"""Styles for how a trial ended. Other endings are red."""


def tune(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    search: SpaceFile = None,
    trials: Trials = None,
    steps: Steps = None,
    seed: Seed = None,
    folder: TuneDir = None,
    out: Out = None,
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Choose a recipe's settings by trials on this machine, and write RECIPE.tuned.yaml.

    Measures a few steps in the planner's best layouts. With `--search`, trains points of a
    space of hyperparameters and compares their losses. A trial that fails or hangs is a result.
    The same command continues what was stopped or killed. Needs Optuna (`pip install optuna`).

    Example: `dmt tune llama-bytes --set parallel.engine=auto`

    Example: `dmt tune llama-bytes --search space.yaml --trials 30`
    """
    survive_lost_output()
    refuse_useless(
        {
            "--cluster": (cluster, search is None, "without --search"),
            "--steps": (steps, search is None, "without --search"),
            "--seed": (seed, search is not None, "with --search"),
        }
    )
    loaded = load_recipe(recipe, overrides, cluster)
    check_waits(loaded)
    file, kind = out or tuned_path(recipe), "tune" if search is None else "search"
    check_tuned_path(file, "" if search is None else " --search")
    options = [] if cluster is None else ["--cluster", cluster]
    if starts_locally(loaded):
        name = loaded.launch.launcher
        tell(f"launch.launcher: {name} hands its jobs over; the trials are started by local")
        options += ["--launcher", "local"]
    request = TuneRequest(
        recipe, overrides, loaded, folder or Path("runs") / f"{loaded.name}-{kind}",
        trials or (12 if search is None else 30),
        min(_LONGEST_STEP_S, loaded.launch.hang_timeout_s), options,
    )  # fmt: skip
    if search is not None:
        space = load_space(search, recipe, overrides)
        _search(SearchStudy(request, space, seed or 0), file, as_json)
        return
    where = None if cluster is None else find_cluster(cluster)
    loaded, layouts = searched(loaded, where)
    make_folder(request.folder)
    with claimed(RunDirectory(request.folder)):
        study = LayoutStudy(replace(request, recipe=loaded), layouts, steps or 10)
        is_over = _run(study)
        lines: list[str] = []
        if best := study.best():
            write_tuned(study, best, file, where)
            lines = [f"fastest: {_fastest(study, best)}"]
    facts = {"considered": len(layouts.fitting), "planned": named(layouts.best)}
    _print(study, is_over, as_json, file, facts, lines)


def _search(study: SearchStudy, file: Path, as_json: bool) -> None:
    """Search hyperparameters, and write the best point."""
    if study.rung is None:
        tell(
            "no trial is stopped early: that needs training.steps or tokens, and losses before "
            "the end (evaluation.every_steps, or logging.every_steps without validation)"
        )
    is_over = _run(study)
    if best := study.best():
        note = f"loss {best.value:.4f}, trial {best.number}"
        write_searched(study.request.path, study.overrides(best.settings), file, note)
    _print(study, is_over, as_json, file, {}, [f"best: trial {best.number}"] if best else [])


def _run(study: Study) -> bool:
    """Run the trials that are left, with a bar and a line per trial."""
    request, done = study.request, len(study.counted())
    check_local_files(request.recipe, request.path, request.overrides)
    if done:
        tell(f"{done} trials ended before, in {request.folder}")
    with progress("trials", done + study.left()) as update:
        update(completed=done)

        def on_end(one: TrialRecord) -> None:
            texts = ", ".join(f"{name} {text(one)}" for name, text in study.columns().items())
            outcome = "" if one.measured else f"{_outcome(one)}; "
            update(completed=len(study.counted()))
            tell(f"trial {one.number}: {outcome}{texts}")

        return study.run(on_end)


def _print(
    study: Study, is_over: bool, as_json: bool, file: Path, facts: dict[str, Any],
    lines: Sequence[str],
) -> None:  # fmt: skip
    """Print every trial, and how to use the best. Raises RunFailed if there is none."""
    best, folder = study.best(), study.request.folder

    def plain(one: TrialRecord) -> dict[str, Any]:
        known = asdict(one)
        value = known.pop("value")
        return {**known, study.measures: value, **study.facts(one)}

    data = facts | {
        "recipe": str(study.request.path), "directory": str(folder), "tuned": str(file),
        "best": best and plain(best), "trials": [*map(plain, study.ranked())],
    }  # fmt: skip
    if not is_over:
        tell(f"{folder}: stopped; start the same command again to continue")
    code = EXIT_DONE if is_over else EXIT_RESUMABLE
    if best is not None:
        lines = [*lines, f"wrote {file}: dmt launch {quote(str(file))}"]
    output(as_json, data, _lines(study, best, lines), wrap=False, exit_code=code)
    if best is None:
        logs = f"{folder}/trials/*/launch.log"
        raise RunFailed(study.failure, fix=f"read {logs}; the same command tries again")


def _outcome(one: TrialRecord) -> str:
    return one.ending.replace("_", " ") + (f": {one.reason}" if one.reason else "")


def _lines(study: Study, best: TrialRecord | None, end: Sequence[str]) -> Iterator[Line]:
    """Lines of the table, and how to use the result."""

    def style(one: TrialRecord) -> str:
        return "bold green" if one == best else _STYLES.get(one.ending, "red")

    texts = {"#": lambda one: str(one.number), **study.columns(), "outcome": _outcome}
    records = study.ranked()
    yield Text(f"{len(records)} trials are in {study.request.folder}/trials", "bold")
    if records:
        yield from Table(texts, left=2).lines(records, style)
    yield from end


def _fastest(study: LayoutStudy, best: TrialRecord) -> str:
    """The fastest layout next to the planner's choice."""
    name, choice = named(study.estimate(best)), named(study.search.best)
    if name == choice:
        return f"{name}, the planner's choice"
    for one in study.records():
        if named(study.estimate(one)) == choice and one.measured and one.value and best.value:
            name += f", {one.value / best.value:.2f} × as fast as the planner's choice"
    return name
