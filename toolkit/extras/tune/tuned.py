"""RECIPE.tuned.yaml: the recipe, and the settings that a tuning chose."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.errors import DmtError, RecipeError, RunFailed
from toolkit.extras.tune.layouts import LayoutStudy, key_of, named, searched, settings_of
from toolkit.extras.tune.study import TrialRecord, TuneRequest
from toolkit.intake.layers import read_overrides
from toolkit.intake.load import load_recipe
from toolkit.plan.hardware.cluster import Cluster
from toolkit.recipe.dump import dump
from toolkit.recipe.places import RECIPES, SHIPPED, find_recipe
from toolkit.recipe.schema import Recipe
from toolkit.system.atomic import write_atomically
from toolkit.text.dotted import get, nested
from toolkit.text.generated import check_out

HEADER = "# Written by `dmt tune"
_NEUTRAL: tuple[object, ...] = (1, False, None, "none", [])
"""Values of a layout that leave a dimension unused."""


def tuned_path(recipe: Path) -> Path:
    """`RECIPE.tuned.yaml` next to the recipe. In the working directory for a shipped one."""
    file = find_recipe(recipe)
    name = f"{file.stem}.tuned.yaml"
    return Path(name) if RECIPES in file.resolve().parents else file.with_name(name)


def check_tuned_path(file: Path, mode: str = "") -> None:
    """Raises as `check_out` does, unless `dmt tune` wrote the file in this mode."""
    check_out(file, f"{HEADER}{mode}`", f"`dmt tune{mode}`")


def write_tuned(
    tuning: LayoutStudy, best: TrialRecord, file: Path, cluster: Cluster | None
) -> None:
    """Write the recipe with the fastest layout. What the layout does not use stays `auto`, if
    the planner then chooses this layout. Raises RunFailed if it plans as another one."""
    estimate = tuning.estimate(best)
    layout, predicted_s = named(estimate), estimate.step_s
    notes = [
        f"{HEADER}`: {layout}",
        f"# measured: {best.value:.4g} s per step; predicted: {predicted_s:.4g} s",
    ]
    typed, chosen, stated = _typed(tuning.request), best.settings, None
    with suppress(RecipeError):  # without the overrides, it may have a mistake
        stated = load_recipe(tuning.request.path).model_dump()
    needed = {key: value for key, value in chosen.items() if value not in _NEUTRAL}
    for settings in (typed | needed, typed | chosen):
        new = {key: v for key, v in settings.items() if not stated or v != get(stated, key)}
        _write(tuning.request.path, file, nested(new), *notes)
        with suppress(DmtError):
            if _plans_as(best, load_recipe(file), cluster):
                return
    searched(load_recipe(file), cluster)  # raises the recipe's own error, if it has one
    raise RunFailed(f"{file}: it is planned as another layout than {layout}")


def write_searched(recipe: Path, overrides: Sequence[str], file: Path, note: str) -> None:
    """Write the recipe with these `KEY=VALUE` settings."""
    settings = read_overrides(overrides)[0].data
    _write(recipe, file, settings, f"{HEADER} --search`: {note}")


def _write(recipe: Path, file: Path, settings: Mapping[str, Any], *notes: str) -> None:
    tree = {"extends": _extended(find_recipe(recipe), file), **settings}
    write_atomically(file, "\n".join([*notes, dump(tree, flow=False)]))


def _typed(request: TuneRequest) -> dict[str, Any]:
    """The settings of `--set` and `--cluster`."""
    keys = [override.partition("=")[0] for override in request.overrides]
    if "--cluster" in request.options:
        keys += ["cluster.nodes", "cluster.gpus_per_node", "cluster.gpu"]
    return {key: get(request.recipe.model_dump(), key) for key in keys}


def _plans_as(best: TrialRecord, recipe: Recipe, cluster: Cluster | None) -> bool:
    """Whether the planner chooses the measured layout for a recipe."""
    planned = searched(recipe, cluster)[1].best
    return key_of(settings_of(planned)) == key_of(best.settings)


def _extended(recipe: Path, file: Path) -> str:
    """Return the value of `extends` in `file`."""
    if RECIPES in recipe.resolve().parents:
        return f"{SHIPPED}{recipe.resolve().relative_to(RECIPES)}"
    return os.path.relpath(recipe.absolute(), file.absolute().parent)
