"""What a tuning leaves behind: a recipe."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import RecipeError, RunFailed
from toolkit.extras.tune.candidates import key_of
from toolkit.extras.tune.throughput import Measurement, Tuning, searched
from toolkit.hardware.cluster import Cluster
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe
from toolkit.recipe import yaml_nodes
from toolkit.recipe.dump import dump
from toolkit.recipe.places import RECIPES, SHIPPED, find_recipe
from toolkit.system.atomic import write_atomically
from toolkit.text.dotted import get, nested
from toolkit.text.generated import check_out

HEADER = "# Written by `dmt tune"
"""Its end is the mode: one does not overwrite what the other has written."""


def tuned_path(recipe: Path) -> Path:
    """`RECIPE.tuned.yaml` next to the recipe; of a shipped one, in the working directory."""
    file = find_recipe(recipe)
    name = f"{file.stem}.tuned.yaml"
    return Path(name) if RECIPES in file.resolve().parents else file.with_name(name)


def check_tuned_path(file: Path, mode: str = "") -> None:
    """Raises as `check_out` does, unless `dmt tune` wrote the file in this mode."""
    check_out(file, f"{HEADER}{mode}`", f"`dmt tune{mode}`")


def tuned_recipe(tuning: Tuning, best: Measurement, file: Path) -> str:
    """The recipe with the settings of the fastest layout, and those of this command line,
    where its file says something else."""
    notes = [
        f"{HEADER}`: {best.layout}",
        f"# measured: {best.step_time_s:.4g} s per step; predicted: {best.predicted_s:.4g} s",
    ]
    return _extending(tuning.path, file, nested(chosen_settings(tuning, best)), *notes)


def write_searched(recipe: Path, overrides: Sequence[str], file: Path, note: str) -> None:
    """Write the recipe with these `KEY=VALUE` settings."""
    settings = yaml_nodes.to_data(read_layers(recipe, overrides).trees[-1])
    text = _extending(recipe, file, settings, f"{HEADER} --search`: {note}")
    write_atomically(file, text)


def _extending(recipe: Path, file: Path, settings: Mapping[str, Any], *notes: str) -> str:
    tree = {"extends": _extended(find_recipe(recipe), file), **settings}
    return "\n".join([*notes, dump(tree, flow=False)])


def chosen_settings(tuning: Tuning, best: Measurement) -> dict[str, Any]:
    """What the tuned recipe states."""
    keys = [override.partition("=")[0] for override in tuning.overrides]
    if tuning.options:  # a cluster was named
        keys += ["cluster.nodes", "cluster.gpus_per_node", "cluster.gpu"]
    values = {key: get(tuning.recipe.model_dump(), key) for key in keys} | best.settings
    try:
        stated = load_recipe(tuning.path).model_dump()
    except RecipeError:  # without the overrides
        return values
    return {key: value for key, value in values.items() if value != get(stated, key)}


def _extended(recipe: Path, file: Path) -> str:
    """What `extends` says in `file`."""
    if RECIPES in recipe.resolve().parents:
        return f"{SHIPPED}{recipe.resolve().relative_to(RECIPES)}"
    return os.path.relpath(recipe.absolute(), file.absolute().parent)


def check_tuned(tuning: Tuning, best: Measurement, file: Path, cluster: Cluster | None) -> None:
    """Raises RunFailed if planning the tuned recipe gives another layout."""
    planned = searched(load_recipe(file), cluster)[1].best
    measured = tuning.candidates.by_key.get(key_of(best.settings))
    if measured is not None and (planned.pair, planned.layout) != measured[:2]:
        raise RunFailed(f"{file}: it is planned as another layout than {best.layout}")
