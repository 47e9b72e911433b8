"""Which settings may differ between the starts of a run, and which do."""

from collections.abc import Iterator
from typing import Any

from toolkit.errors import RecipeError
from toolkit.recipe import yaml_text
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.schema import LENGTH_SETTINGS
from toolkit.removed import without_unset
from toolkit.text.dotted import is_within

MAY_CHANGE = (
    *LENGTH_SETTINGS,
    "training.micro_batch_size",
    "data.cache",  # of an earlier release: it changed no data
    "data.stages",
    "data.validation",
    "evaluation",
    "logging",
    "checkpoint",
    "guard",
    "cluster",
    "parallel",
    "launch",
)
"""Settings that a resumed run may change: length, speed, devices, logging, and future stages of
the data (a checkpoint records the past ones). Any other would make it a different run, with
other weights, data or losses."""
ON_REQUEST = (
    "optimizer.learning_rate",
    "optimizer.weight_decay",
    "optimizer.clip_grad_norm",
    "schedule",
)
"""Settings that `dmt launch --change` changes in a run that continues: they leave its data and
its optimizer states as they are."""

_ABSENT = object()


def parse_recipe(text: str) -> dict[str, Any]:
    """The values of a recorded recipe, within the bounds of a user's. Raises ValueError."""
    try:
        stated, problems = yaml_text.parse(text, "recipe.yaml")
    except RecipeError as error:
        problems = list(error.problems)
    if problems:
        raise ValueError(f"line {problems[0].line}: found {problems[0].found}")
    if not isinstance(stated.data, dict):
        raise ValueError("not a mapping of names to values")
    return stated.data


def shown(value: object) -> str:
    """A setting's value for a message."""
    return "nothing" if value is _ABSENT else in_yaml(value)


def is_stated(value: object) -> bool:
    """Whether this value, of two that `differences` found, is present."""
    return value is not _ABSENT


def may_change(key: str) -> bool:
    """Whether a resumed run may change this setting."""
    return is_within(key, MAY_CHANGE)


def changes(old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    """`differences` of two recipes, without what only a newer release can state: a release
    that did not know a setting had its default. Nor without removed settings that were null.
    The model's config has no defaults of ours."""
    for key, before, now in differences(without_unset(old), new):
        if is_stated(before) or key.startswith("model.config"):
            yield key, before, now


def differences(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value) of every setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            inner = f"{prefix}.{key}" if prefix else str(key)
            yield from differences(old.get(key, _ABSENT), new.get(key, _ABSENT), inner)
    elif old != new:
        yield prefix, old, new
