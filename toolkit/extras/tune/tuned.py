"""What a tuning leaves behind: the recipe with the fastest layout, and the cluster's speeds."""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from toolkit.errors import BackendUnavailable, PlanError, RecipeError, RunFailed
from toolkit.extras.tune.candidates import key_of
from toolkit.extras.tune.throughput import Measurement, Tuning, searched
from toolkit.hardware.cluster import Cluster, default_cluster, usual_cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.layers import read_layers
from toolkit.intake.load import load_recipe
from toolkit.recipe import yaml_nodes
from toolkit.recipe.dump import dump
from toolkit.recipe.places import RECIPES, SHIPPED, find_recipe
from toolkit.recipe.schema import ClusterSection, Recipe
from toolkit.system.atomic import write_atomically
from toolkit.text.dotted import get, nested
from toolkit.text.generated import check_out
from toolkit.text.terminal import tell

HEADER = "# Written by `dmt tune"
"""Its end is the mode: one does not overwrite what the other has written."""
MACHINE = "machine.yaml"
"""In the folder: this machine's measured speeds."""


def tuned_path(recipe: Path) -> Path:
    """`RECIPE.tuned.yaml` next to the recipe; of a shipped one, in the working directory."""
    file = find_recipe(recipe)
    name = f"{file.stem}.tuned.yaml"
    return Path(name) if RECIPES in file.resolve().parents else file.with_name(name)


def check_tuned_path(file: Path, mode: str) -> None:
    """Raises as `check_out` does, unless `dmt tune` wrote the file in this mode."""
    check_out(file, f"{HEADER} {mode}`", f"`dmt tune {mode}`")


def tuned_recipe(tuning: Tuning, best: Measurement, file: Path) -> str:
    """The recipe with the settings of the fastest layout, and those of this command line,
    where its file says something else."""
    notes = [
        f"{HEADER} --throughput`: {best.layout}",
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


def calibrated_cluster(folder: Path, recipe: Recipe, stated: str | None) -> Path | None:
    """The file with this machine's measured speeds: `--cluster` where that is one, else they
    are measured, once per tuning; None, after a line about it, where that is not possible."""
    if stated is not None and find_cluster(stated).gpu.measured is not None:
        return Path(stated)
    file = folder / MACHINE
    if not file.exists() and not _write_machine(file, recipe.cluster):
        return None
    if stated is None or not Path(stated).is_file():
        return file
    named = folder / "named.yaml"
    write_atomically(named, _with_speeds(Path(stated), file))
    return named


def check_measured_size(folder: Path, recipe: Recipe) -> None:
    """Raises PlanError if the speeds in the folder are those of another cluster: its results
    are, too."""
    file = folder / MACHINE
    section = recipe.cluster
    if not file.exists():
        return
    here = usual_cluster(section).section
    if find_cluster(str(file)).section != here:
        raise PlanError(
            f"{file} has the speeds of another cluster than the recipe's",
            fix="--dir OTHER, or remove the folder",
        )


def _write_machine(file: Path, section: ClusterSection) -> bool:
    """Measure; False, after a line about it, where that is not possible."""
    try:
        if section.nodes > 1:
            raise PlanError("several nodes: --cluster FILE names measured speeds of them")
        text = _calibrated(section.gpus_per_node, default_cluster(1, 1, section.gpu).gpu.name)
    except (PlanError, BackendUnavailable, RunFailed) as error:
        tell(f"predictions are not calibrated: {error.message}")
        return False
    write_atomically(file, text)
    return True


def _with_speeds(stated: Path, machine: Path) -> str:
    """A cluster file with the speeds of another one, where it has none of its own."""
    yaml = _yaml()
    data = yaml.load(stated.read_text(encoding="utf-8"))
    speeds = yaml.load(machine.read_text(encoding="utf-8"))["measured"]
    data["measured"] = speeds | data.get("measured", {})
    return _dumped(yaml, data)


def _calibrated(processes: int, gpu: str) -> str:
    """A cluster file as `dmt doctor --calibrate` writes it; see there for what it raises."""
    from toolkit.doctor import calibrate  # imports torch

    machine = calibrate.this_machine(processes)
    calibrate.check_known(machine, "dmt tune")
    if machine.gpu != gpu:
        raise PlanError(f"cluster.gpu is {gpu}, this machine has {machine.gpu}")
    calibrate.tell_count(machine)
    return calibrate.cluster_text(machine, calibrate.calibrate(machine))


def rescaled(text: str, factor: float, name: str) -> str:
    """A cluster file whose measured speeds are all `factor` times as high."""
    yaml = _yaml()
    data = yaml.load(text)
    _scale(data["measured"], factor)
    return f"{_dumped(yaml, data)}# dmt tune: measured speeds × {factor:.4g}, of {name}\n"


def _yaml() -> Any:
    yaml = YAML()
    yaml.width = 2**16
    return yaml


def _dumped(yaml: Any, data: Any) -> str:
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()


def _scale(speeds: Any, factor: float) -> None:
    for key, value in speeds.items():
        if isinstance(value, Mapping):
            _scale(value, factor)
        else:
            speeds[key] = float(f"{value * factor:.4g}")
