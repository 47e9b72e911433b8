"""`dmt tune RECIPE --search SPACE.yaml`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.cli.output import output
from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE, RunFailed
from toolkit.extras.tune.outcome import outcome_lines, outcome_of
from toolkit.extras.tune.search import (
    HyperparameterSearch,
    SearchRequest,
    first_rung,
)
from toolkit.extras.tune.space import load_space
from toolkit.extras.tune.trial import DeviceSlice, check_waits, device_slices, run_trial
from toolkit.extras.tune.tuned import check_tuned_path, tuned_path, write_searched
from toolkit.intake.load import load_recipe
from toolkit.launcher import LAUNCHERS
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import check_local_files
from toolkit.text.terminal import tell


@dataclass(frozen=True)
class SearchOptions:
    """What the command line asks of a search."""

    space: Path | None
    folder: Path | None
    out: Path | None
    trials: int
    parallel: int
    seed: int
    prune: bool
    hang_s: float
    as_json: bool


def search_recipe(recipe: Path, overrides: Sequence[str], options: SearchOptions) -> None:
    """Search, print and write what was found; the same command continues what was stopped.

    Raises RecipeError for every mistake in the space, else as `HyperparameterSearch`.
    """
    request = request_of(recipe, overrides, options)
    file = options.out or tuned_path(recipe)
    check_tuned_path(file, " --search")
    check_local_files(load_recipe(recipe, request.overrides), recipe, request.overrides)
    run = partial(run_trial, recipe, hang_s=options.hang_s)
    search = HyperparameterSearch(request, run)
    if request.prune and first_rung(search.recipe, request.space) is None:
        tell(
            "no trial is stopped early: that needs training.steps or tokens, and losses before "
            "the end (evaluation.every_steps, or logging.every_steps without validation)"
        )
    finished = search.run()
    outcome = outcome_of(search)
    if outcome.best is not None:
        chosen = request.space.overrides(outcome.best.settings)
        note = f"{outcome.loss_name} {outcome.best.loss:.4f}, trial {outcome.best.number}"
        write_searched(recipe, [*request.overrides, *chosen], file, note)
        tell(f"{file} written: the settings of trial {outcome.best.number}")
    _finish(finished, request.folder, options, outcome.machine_output(), outcome_lines(outcome))
    if outcome.best is None:
        logs = f"{request.folder}/trials/*/launch.log"
        raise RunFailed("no trial came to its end", fix=f"the reasons are in {logs}")


def _finish(
    finished: bool, folder: Path, options: SearchOptions, data: object, lines: Any
) -> None:
    if not finished:
        tell(f"{folder}: stopped; start the same command again to continue")
    code = EXIT_DONE if finished else EXIT_RESUMABLE
    output(options.as_json, data, lines, exit_code=code)


def default_folder(recipe: Recipe) -> Path:
    return Path("runs") / f"{recipe.name}-search"


def request_of(recipe: Path, overrides: Sequence[str], options: SearchOptions) -> SearchRequest:
    """The search that is asked for. Raises RecipeError and PlanError."""
    assert options.space is not None
    overrides = [*overrides, *_under_ray()]
    loaded = load_recipe(recipe, overrides)
    check_waits(loaded)
    return SearchRequest(
        recipe,
        tuple(overrides),
        load_space(options.space, recipe, overrides),
        options.folder or default_folder(loaded),
        options.trials,
        slices_of(loaded, options.parallel),
        options.seed,
        prune=options.prune,
    )


def _under_ray() -> list[str]:
    """Inside a job of Ray (`ray job submit`), trials run on its cluster."""
    if "RAY_ADDRESS" not in os.environ:
        return []
    return ["launch.launcher=ray", "launch.ray.address=auto"]


def slices_of(recipe: Recipe, parallel: int) -> list[DeviceSlice]:
    """The devices of each of the trials that run at a time: of this machine, or those that a
    launcher gives to a run, which waits for them."""
    if LAUNCHERS[recipe.launch.launcher].waits:
        return [DeviceSlice(number) for number in range(parallel)]
    return device_slices(recipe.cluster, parallel)
