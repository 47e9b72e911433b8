"""SPACE.yaml: which settings of a recipe a search varies.

```yaml
optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
schedule.warmup_steps: {low: 0, high: 100, step: 10}
optimizer.weight_decay: [0.0, 0.01, 0.1]
```

Bounds and choices are judged by the recipe's own schema, with the same errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.errors import Problem, RecipeError
from toolkit.intake.layers import describe_node
from toolkit.intake.load import refused_value
from toolkit.recipe import yaml_nodes
from toolkit.recipe.describe import accepts, settings
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.yaml_nodes import WHOLE_FILE, Location, Scalar, YamlEntry
from toolkit.text.suggest import did_you_mean

Number: TypeAlias = int | float

_RANGE = {"low": "a number", "high": "a number", "log": "true or false", "step": "a number > 0"}
_FORM = "a map of low, high and, if wanted, log or step; or a list of choices"
_SAME_FOR_ALL = {
    "cluster": "every trial runs on its share of this machine's devices",
    "name": "every trial has a run directory of its own",
    "launch": "`dmt tune` starts the trials",
    "logging": "it does not change what is learned",
    "checkpoint": "it does not change what is learned",
    "evaluation": "trials are compared by the loss on the same validation data",
    "data.validation": "trials are compared by the loss on the same validation data",
    "data.validation_fraction": "trials are compared by the loss on the same validation data",
    "data.tokenizer": "losses per token of different tokenizers cannot be compared",
    "training.sequence_length": "losses at different lengths cannot be compared",
    "training.steps": "trials are compared at the same steps",
    "training.tokens": "trials are compared at the same steps",
    "training.epochs": "trials are compared at the same steps",
    "training.precision": "it changes what a step costs: `dmt tune --throughput` compares that",
    "training.objective": "losses of different objectives cannot be compared",
    "dpo": "losses of different objectives cannot be compared",
    "orpo": "losses of different objectives cannot be compared",
}
"""Settings that cannot be searched, or sections of them, and why."""


@dataclass(frozen=True)
class Range:
    """A setting between two bounds, both included."""

    key: str
    low: Number
    high: Number
    log: bool = False
    """Whether its logarithm is uniform."""
    step: Number | None = None
    whole: bool = False
    """Whether the setting is an integer."""


@dataclass(frozen=True)
class Choices:
    """A setting that is one of some values."""

    key: str
    values: tuple[str, ...]
    """As a recipe states them, on one line."""


Parameter: TypeAlias = Range | Choices


@dataclass(frozen=True)
class SearchSpace:
    """What a search varies."""

    parameters: tuple[Parameter, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The settings, in the order of the file."""
        return tuple(one.key for one in self.parameters)

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """`KEY=VALUE` texts, as of `--set`, of a point of this space."""
        return [
            f"{one.key}={_text(values[one.key])}"
            for one in self.parameters
            if one.key in values
        ]


def _text(value: Any) -> str:
    """Choices are text already."""
    return value if isinstance(value, str) else in_yaml(value)


def load_space(path: Path, recipe: Path, overrides: Sequence[str] = ()) -> SearchSpace:
    """Read a space, and judge it by the recipe that is searched.

    Raises RecipeError with every mistake in it, or if it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "bytes that are no UTF-8"
        found, fix = str(reason), "name a YAML file that maps settings to ranges and choices"
        raise RecipeError([Problem(WHOLE_FILE, found, "a file", fix, str(path))]) from error
    root, problems = yaml_nodes.parse(text, str(path))
    if not isinstance(root, yaml_nodes.Mapping) or not root.entries:
        fix = "e.g. optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}"
        place = Location(str(path), max(1, root.place.line))
        found = "an empty file" if _is_empty(root) else describe_node(root)
        wrong = Problem(WHOLE_FILE, found, "a map of settings", fix, *place)
        raise RecipeError([*problems, wrong])
    parameters = []
    for key, entry in root.entries.items():
        found_here = [*_problems(key, entry)]
        if not found_here:
            found_here = [*_refused(key, entry, recipe, overrides)]
        problems += found_here
        if not found_here:
            parameters.append(_parameter(key, entry.node))
    if problems:
        raise RecipeError(problems)
    return SearchSpace(tuple(parameters))


def _is_empty(node: yaml_nodes.Node) -> bool:
    return isinstance(node, yaml_nodes.Mapping) or (
        isinstance(node, Scalar) and node.value is None
    )


def _problems(key: str, entry: YamlEntry) -> Iterator[Problem]:
    """What is wrong with the form of one entry, whatever its setting is."""
    node = entry.node
    for section, why in _SAME_FOR_ALL.items():
        if key == section or key.startswith(f"{section}."):
            yield Problem(key, "a setting that trials share", why, "remove it", *entry.place)
            return
    if isinstance(node, yaml_nodes.Mapping) and {"low", "high"} & node.entries.keys():
        yield from _range_problems(key, entry.place, node)
    elif isinstance(node, yaml_nodes.Mapping):
        found, inner = "a map without low and high", next(iter(node.entries), "KEY")
        yield Problem(key, found, _FORM, f"write it as `{key}.{inner}: …`", *entry.place)
    elif isinstance(node, yaml_nodes.Sequence):
        texts = [in_yaml(yaml_nodes.to_data(item)) for item in node.items]
        if len(set(texts)) < max(2, len(texts)):
            found = f"[{', '.join(texts)}]"
            allowed, fix = "two or more different choices", f"for one value: --set {key}=VALUE"
            yield Problem(key, found, allowed, fix, *entry.place)
    else:
        found = describe_node(node)
        yield Problem(key, found, _FORM, f"for one value: --set {key}={found}", *node.place)


def _range_problems(key: str, place: Location, node: yaml_nodes.Mapping) -> Iterator[Problem]:
    """What is wrong with a map of low, high, log and step."""
    bad = False
    for name, entry in node.entries.items():
        if name not in _RANGE:
            fix = did_you_mean(name, _RANGE, "remove it")
            yield Problem(
                f"{key}.{name}", "an unknown key", ", ".join(_RANGE), fix, *entry.place
            )
        elif not _is_right(name, entry.node):
            bad, found = True, describe_node(entry.node)
            yield Problem(f"{key}.{name}", found, _RANGE[name], "", *entry.node.place)
    for name in ("low", "high"):
        if name not in node.entries:
            bad = True
            yield Problem(f"{key}.{name}", "nothing", "a number", f"add `{name}:`", *place)
    if bad:
        return
    low, high, log, step = _bounds(node)
    found = f"low {low}, high {high}"
    if low >= high:
        yield Problem(key, found, "a low below high", "exchange them", *place)
    elif log and low <= 0:
        fix = "write a low above 0, or remove log"
        yield Problem(f"{key}.low", str(low), "a number > 0 with log: true", fix, *place)
    if log and step is not None:
        yield Problem(key, "both log and step", "one of them", "remove one", *place)
    elif step is not None and step > high - low:
        yield Problem(f"{key}.step", str(step), "at most high - low", "", *place)
    elif step is not None:
        # As decimals: 0.3 is three times 0.1.
        start, end, each = (Decimal(str(number)) for number in (low, high, step))
        if rest := (end - start) % each:
            found, fix = f"{step}, {found}", f"high: {end - rest} or {end - rest + each}"
            yield Problem(f"{key}.step", found, "steps that end at high", fix, *place)
    if key not in settings() and _is_unclear(low, high):
        allowed = "both integers, or both with a decimal point"
        fix = f"high: {int(high)}, or low: {float(low)} and high: {float(high)}"
        yield Problem(key, found, allowed, fix, *place)


def _is_unclear(low: Number, high: Number) -> bool:
    """Whether one bound is an integer and the other one is one with a decimal point, so that
    the range may be of either."""
    return type(low) is not type(high) and low == int(low) and high == int(high)


def _is_right(name: str, node: yaml_nodes.Node) -> bool:
    value = node.value if isinstance(node, Scalar) else None
    if name == "log":
        return isinstance(value, bool)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and (name != "step" or value > 0)  # type: ignore[operator]


def _bounds(node: yaml_nodes.Mapping) -> tuple[Any, Any, bool, Any]:
    stated = yaml_nodes.to_data(node)
    return stated["low"], stated["high"], stated.get("log", False), stated.get("step")


def _refused(
    key: str, entry: YamlEntry, recipe: Path, overrides: Sequence[str]
) -> Iterator[Problem]:
    """What the recipe's schema has against the bounds or choices of a setting."""
    node = entry.node
    if isinstance(node, yaml_nodes.Sequence):
        values, info = node.items, None
    else:
        assert isinstance(node, yaml_nodes.Mapping)
        values = tuple(node.entries[name].node for name in ("low", "high"))
        info = settings().get(key)
    if info and not (
        accepts(info.info.annotation, float) or accepts(info.info.annotation, int)
    ):
        fix = f"write choices: {key}: [VALUE, VALUE]"
        yield Problem(key, "a range", f"choices of {info.allowed}", fix, *entry.place)
        return
    for value in values:
        stated = YamlEntry(Location(entry.place.file, value.place.line), value)
        if problem := refused_value(recipe, overrides, key, stated):
            yield problem
            return
    if not isinstance(node, yaml_nodes.Mapping) or not _is_whole(key, node):
        return
    if step := node.entries.get("step"):
        text = describe_node(step.node)
        if not isinstance(yaml_nodes.to_data(step.node), int):
            yield Problem(f"{key}.step", text, "an integer", "", *step.node.place)


def _is_whole(key: str, node: yaml_nodes.Mapping) -> bool:
    """Whether a range has integers only: as its setting, or, where that may be anything, as
    its bounds."""
    setting = settings().get(key)
    if setting is not None:
        return not accepts(setting.info.annotation, float)
    return all(isinstance(bound, int) for bound in _bounds(node)[:2])


def _parameter(key: str, node: yaml_nodes.Node) -> Parameter:
    if isinstance(node, yaml_nodes.Sequence):
        return Choices(key, tuple(in_yaml(yaml_nodes.to_data(item)) for item in node.items))
    assert isinstance(node, yaml_nodes.Mapping)
    low, high, log, step = _bounds(node)
    whole = _is_whole(key, node)
    kind = int if whole else float
    return Range(key, kind(low), kind(high), log, None if step is None else kind(step), whole)
