"""What a tuning leaves behind: the recipe with the fastest layout, and the cluster's speeds."""

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from toolkit.errors import BackendUnavailable, PlanError, RunFailed
from toolkit.extras.tune.candidates import key_of
from toolkit.extras.tune.throughput import Measurement, Tuning
from toolkit.hardware.cluster import Cluster, default_cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import explore
from toolkit.recipe.dump import dump
from toolkit.recipe.places import RECIPES, SHIPPED, find_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.text.terminal import tell

HEADER = "# Written by `dmt tune --throughput`"


def tuned_path(recipe: Path) -> Path:
    """`RECIPE.tuned.yaml` next to the recipe; of a shipped one, in the working directory."""
    file = find_recipe(recipe)
    name = f"{file.stem}.tuned.yaml"
    return Path(name) if RECIPES in file.resolve().parents else file.with_name(name)


def check_out(file: Path) -> None:
    """Raises PlanError if `file` exists and is not one of ours: before anything is measured."""
    try:
        ours = not file.exists() or file.read_text(encoding="utf-8").startswith(HEADER)
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise PlanError(f"--out: {file} was not written by this command", fix="name another")
    if not os.access(file.absolute().parent, os.W_OK):
        raise PlanError(f"--out: cannot write into {file.parent}", fix="name another folder")


def tuned_recipe(tuning: Tuning, best: Measurement, file: Path) -> str:
    """The recipe with the settings of the fastest layout that it leaves open."""
    values = chosen_settings(tuning.recipe, best.settings)
    notes = [
        f"{HEADER}: {best.layout}",
        f"# measured: {best.step_time_s:.4g} s per step; predicted: {best.predicted_s:.4g} s",
    ]
    if tuning.overrides:
        notes.append(f"# measured with --set {' --set '.join(tuning.overrides)}")
    tree: dict[str, Any] = {"extends": _extended(find_recipe(tuning.path), file)}
    for key, value in values.items():
        inner = tree
        *sections, name = key.split(".")
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return "\n".join([*notes, dump(tree, flow=False)])


def chosen_settings(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a layout's settings that the recipe does not state with the same value."""
    stated: dict[str, Any] = {}
    for key in values:
        value: Any = recipe
        for name in key.split("."):
            value = getattr(value, name)
        stated[key] = value
    return {key: value for key, value in values.items() if value != stated[key]}


def _extended(recipe: Path, file: Path) -> str:
    """What `extends` says in `file`."""
    if RECIPES in recipe.resolve().parents:
        return f"{SHIPPED}{recipe.resolve().relative_to(RECIPES)}"
    return os.path.relpath(recipe.absolute(), file.absolute().parent)


def write_tuned(tuning: Tuning, best: Measurement, file: Path, cluster: Cluster | None) -> None:
    """Write the tuned recipe. Raises RunFailed if planning it gives another layout."""
    jsonl.write_atomically(file, tuned_recipe(tuning, best, file))
    recipe = load_recipe(file, tuning.overrides)
    planned = explore(recipe, cluster).best
    measured = tuning.candidates.by_key.get(key_of(best.settings))
    if measured is not None and (planned.pair, planned.layout) != measured[:2]:
        raise RunFailed(f"{file}: it is planned as another layout than {best.layout}")


def calibrated_cluster(folder: Path, recipe: Recipe, stated: str | None) -> Path | None:
    """The file with this machine's measured speeds: `--cluster` where that is one, else they
    are measured, once per tuning; None, after a line about it, where that is not possible."""
    if stated is not None and find_cluster(stated).gpu.measured is not None:
        return Path(stated)
    file = folder / "machine.yaml"
    if file.exists():
        return file
    section = recipe.cluster
    try:
        if section.nodes > 1:
            raise PlanError("several nodes: --cluster FILE names measured speeds of them")
        text = _calibrated(section.gpus_per_node, default_cluster(1, 1, section.gpu).gpu.name)
    except (PlanError, BackendUnavailable, RunFailed) as error:
        tell(f"predictions are not calibrated: {error.message}")
        return None
    folder.mkdir(parents=True, exist_ok=True)
    jsonl.write_atomically(file, text)
    return file


def _calibrated(processes: int, gpu: str) -> str:
    """A cluster file as `dmt doctor --calibrate` writes it; see there for what it raises."""
    from toolkit.doctor import calibrate  # imports torch

    machine = calibrate.this_machine(processes)
    calibrate.check_known(machine, "dmt tune")
    if machine.gpu != gpu:
        raise PlanError(f"cluster.gpu is {gpu}, this machine has {machine.gpu}")
    calibrate.tell_count(machine)
    return calibrate.cluster_text(machine, calibrate.calibrate(machine))


def rescaled(text: str, factor: float, notes: Sequence[str]) -> str:
    """A cluster file whose measured speeds are all `factor` times as high."""
    yaml: Any = YAML()
    yaml.width = 2**16
    data = yaml.load(text)
    _scale(data["measured"], factor)
    stream = io.StringIO()
    yaml.dump(data, stream)
    return stream.getvalue() + "".join(f"# {note}\n" for note in notes)


def _scale(speeds: Any, factor: float) -> None:
    for key, value in speeds.items():
        if isinstance(value, Mapping):
            _scale(value, factor)
        else:
            speeds[key] = float(f"{value * factor:.4g}")
