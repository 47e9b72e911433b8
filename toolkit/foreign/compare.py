"""`dmt check --against`: settings of a recipe and its plan that another tool's file states."""

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import DmtError
from toolkit.foreign.carry import (
    ACCUMULATION,
    SHARDS,
    TRACKERS,
    WORLD,
    Carried,
    ForeignSetting,
    Found,
    Left,
    relative_to_file,
    same,
)
from toolkit.foreign.megatron import config_of
from toolkit.foreign.statements import add_batch, add_betas, read_together
from toolkit.models.hub import model_config
from toolkit.plan.dimensions import settings
from toolkit.plan.plan import Plan
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import Recipe
from toolkit.recipe.words import settings as recipe_settings
from toolkit.text.dotted import leaves
from toolkit.text.redact import redact

_AUTO = "auto"
_INTERVALS = ("evaluation.every_steps", "checkpoint.every_steps")
"""Of these, null and the run's steps mean the same: only at the end."""


@dataclass(frozen=True)
class SettingComparison:
    """One setting that both state."""

    key: str
    """The recipe's key, or the word for a number that it derives."""
    recipe: str
    recipe_place: str
    """`FILE:LINE` of the recipe, or `--set`. Empty for a default, and what the plan decides."""
    name: str
    """What the setting is called there."""
    other: str
    place: str
    """`FILE:LINE`."""
    agrees: bool
    fix: str
    """What to do. Empty where the two agree."""


@dataclass(frozen=True)
class FileComparison:
    """A recipe next to one file."""

    source: str
    kind: str
    settings: tuple[SettingComparison, ...]
    left: tuple[Left, ...]
    """Settings of the file that the recipe does not have."""
    misspelt: tuple[Left, ...]
    """Names that the tool does not know."""

    @property
    def agrees(self) -> bool:
        """Whether no value is another one, and no name is misspelt."""
        return all(row.agrees for row in self.settings) and not self.misspelt


def against(
    path: Path, recipe: Recipe, plan: Plan | None, places: Mapping[str, str] = {}
) -> FileComparison:
    """Compare a recipe with the file at `path`. Without a plan, `auto` settings are left out.

    `places`: where the recipe states its settings (`intake.layers.places_of`).

    Raises RecipeError for a file that cannot be read or is not understood.
    """
    found = read_together([path], "--against")
    ours = _values(recipe, plan)
    found.defaults = {}
    add_betas(found)
    add_batch(
        found, None if plan is None else plan.layout.dp, int(ours.get("parallel.context", 1))
    )
    rows = (*_rows(found, ours, places), *_shape_rows(found, recipe, places))
    kind = found.tools[0]
    misspelt = tuple(
        one for one in found.left if one.unknown and (kind.complete or one.at.value is None)
    )
    left = tuple(one for one in found.left if one not in misspelt)
    return FileComparison(str(path), kind.name, tuple(rows), left, misspelt)


def _values(recipe: Recipe, plan: Plan | None) -> dict[str, Any]:
    """Every value of the run by its key. Without a plan, `auto` values are missing."""
    dumped = recipe.model_dump(exclude={"model": {"config"}})
    values = {key: value for key, value in leaves(dumped) if value != _AUTO}
    values |= {f"data.{side}": dumped["data"][side] for side in ("train", "validation")}
    values[WORLD] = recipe.cluster.world_size
    steps = recipe.total_steps()
    if steps is not None:
        values["training.steps"] = steps
        values["schedule.warmup_steps"] = recipe.schedule.warmup(steps)
    elif recipe.schedule.warmup_ratio is not None:
        del values["schedule.warmup_steps"]
    if plan is not None:
        layout = plan.layout
        planned = {
            "parallel.engine": plan.engine,
            "parallel.model": plan.model,
            **settings(layout),
        }
        values = planned | values
        values[ACCUMULATION] = layout.gradient_accumulation
        shards = max(1, layout.dp // layout.replicate) if layout.zero_stage else 1
        values |= {SHARDS: shards, "parallel.replicate": layout.dp // shards}
    return values


def _rows(
    found: Found, ours: Mapping[str, Any], places: Mapping[str, str]
) -> Iterator[SettingComparison]:
    every = [*found.values.items()]
    every += [(key, one) for key, one in found.weak if one.also and key not in found.values]
    for key, one in every:
        value = one.value
        if key == "schedule.warmup_ratio" and ours.get("training.steps"):
            key, value = "schedule.warmup_steps", math.ceil(value * ours["training.steps"])
        if key in _INTERVALS and same(value, ours.get("training.steps")):
            one = replace(one, also=(None,))
        if key in ours and not (ours[key] is None and key.startswith("training.")):
            yield _compared(key, ours[key], value, one, places)


def _compared(
    key: str, ours: Any, value: Any, one: Carried, places: Mapping[str, str]
) -> SettingComparison:
    agrees = same(value, ours) or any(same(other, ours) for other in one.also)
    agrees |= key == TRACKERS and {*value} <= {*ours}
    if key.endswith(".path") and isinstance(value, str):
        agrees |= str(relative_to_file(value, Path(one.at.file)).absolute()) == ours
    there = f"change {one.at.name} at {one.at.place}"
    can_be_set = key in recipe_settings() and not isinstance(value, list | dict)
    here = f"--set {key}={in_yaml(value).replace(' ', '')}, or " if can_be_set else ""
    return SettingComparison(
        key, redact(in_yaml(ours)), places.get(key, ""), one.at.name, one.at.written,
        one.at.place, agrees,
        "" if agrees else redact(here + there),
    )  # fmt: skip


def _shape_rows(
    found: Found, recipe: Recipe, places: Mapping[str, str]
) -> Iterator[SettingComparison]:
    """The model that the file describes, by the names of its config."""
    config, problems = config_of(found)
    if problems or not config:
        for at in found.shape.values():
            found.drop(at, "not compared: no config describes this model", changes=False)
        return
    with suppress(DmtError):  # only on the hub
        ours = model_config(recipe.model)
        first = next(iter(found.shape.values()))
        for name, value in config.items():
            if name in ours:
                at = ForeignSetting(f"the model's {name}", value, first.file, first.line)
                one = Carried(value, at)
                yield _compared(f"model.config.{name}", ours[name], value, one, places)
