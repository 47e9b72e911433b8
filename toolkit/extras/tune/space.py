"""SPACE.yaml: which settings of a recipe a search varies.

```yaml
optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
schedule.warmup_steps: {low: 0, high: 100, step: 10}
optimizer.weight_decay: [0.0, 0.01, 0.1]
```

The recipe's own schema judges bounds and choices, with the same errors.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import Problem, RecipeError
from toolkit.intake.load import refused_value
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.words import settings
from toolkit.recipe.yaml_text import WHOLE_FILE, KeyPath, Location, Stated, parse
from toolkit.text.dotted import nested

_EXAMPLE = "optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}"
_FORM = "a list of two or more choices, or {low, high} with low < high, and log or step"
_SAME_FOR_ALL = (
    *("cluster", "name", "launch", "logging", "checkpoint", "evaluation", "dpo", "orpo"),
    *("data.validation", "data.validation_fraction", "data.tokenizer"),
    *("training.steps", "training.tokens", "training.epochs", "training.sequence_length"),
    *("training.precision", "training.objective"),
)
"""Settings that decide what a loss means, and those that do not change what is learned."""


@dataclass(frozen=True)
class Parameter:
    """One setting: a range whose ends are included, or choices."""

    key: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    """Whether the logarithm is uniform."""
    step: float | None = None
    whole: bool = False
    """Whether the setting is an integer."""
    choices: tuple[str, ...] = ()
    """Values as a recipe states them, on one line. Empty: a range."""

    def suggest(self, trial: Any) -> None:
        """Give an Optuna trial a value. A trial that has one keeps it."""
        if self.choices:
            trial.suggest_categorical(self.key, self.choices)
        elif self.whole:
            trial.suggest_int(self.key, self.low, self.high, log=self.log, step=self.step or 1)
        else:
            trial.suggest_float(self.key, self.low, self.high, log=self.log, step=self.step)


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` texts, as of `--set`, for a point of a space."""
    return [
        f"{key}={value if isinstance(value, str) else in_yaml(value)}"
        for key, value in values.items()
    ]


def load_space(path: Path, recipe: Path, overrides: Sequence[str] = ()) -> list[Parameter]:
    """Read a space, and judge it by the recipe that is searched.

    Raises RecipeError with every mistake in it, or if it cannot be read.
    """
    try:
        root, problems = parse(path.read_text(encoding="utf-8-sig"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        fix = f"name a YAML file, for example with `{_EXAMPLE}`"
        raise RecipeError(
            [Problem(WHOLE_FILE, str(error), "a file", fix, str(path))]
        ) from error
    if not isinstance(root.data, dict) or not root.data:
        fix = f"write for example `{_EXAMPLE}`"
        wrong = Problem(WHOLE_FILE, "none", "a map of settings", fix, str(path), 1)
        raise RecipeError([*problems, wrong])
    space = []
    for key, value in root.data.items():
        place = root.place((key,))
        wrong_here = [*_problems(key, value, place)]
        wrong_here = wrong_here or [*_refused(key, root, recipe, overrides)]
        problems += wrong_here
        if not wrong_here:
            space.append(_parameter(key, value))
    if problems:
        raise RecipeError(problems)
    return space


def _problems(key: str, value: Any, place: Location) -> Iterator[Problem]:
    """Mistakes in the form of one entry, whatever its setting is."""
    found = in_yaml(value)
    if any(key == one or key.startswith(f"{one}.") for one in _SAME_FOR_ALL):
        allowed = "a setting that changes what is learned, not what a loss means"
        yield Problem(key, "the same for all trials", allowed, "remove it", *place)
    elif isinstance(value, list):
        if len({*map(in_yaml, value)}) < max(2, len(value)):
            fix = f"for one value use --set {key}=VALUE"
            yield Problem(key, found, "two or more different choices", fix, *place)
    elif not isinstance(value, dict):
        yield Problem(key, found, _FORM, f"for one value use --set {key}={found}", *place)
    elif reason := _wrong_range(key, value):
        yield Problem(key, found, _FORM, reason, *place)


def _wrong_range(key: str, value: Mapping[str, Any]) -> str:
    """How to correct a range, empty if it is right."""
    if not {"low", "high"} & value.keys():
        return f"write a setting within it as `{key}.{next(iter(value), 'KEY')}: …`"
    if unknown := value.keys() - {"low", "high", "log", "step"}:
        return f"remove {', '.join(sorted(unknown))}"
    numbers = {
        name: value.get(name)
        for name in ("low", "high", "step")
        if name != "step" or name in value
    }
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            return f"give `{name}` a number"
    if not isinstance(log := value.get("log", False), bool):
        return "give `log` true or false"
    low, high, step = value["low"], value["high"], value.get("step")
    if low >= high:
        return "give `high` more than `low`"
    if log and low <= 0:
        return "give `low` more than 0, or remove `log`"
    if log and step is not None:
        return "remove `log` or `step`"
    if step is not None and not 0 < step <= high - low:
        return f"give `step` more than 0 and at most {high - low}"
    if _is_whole(key, value) and not all(isinstance(one, int) for one in numbers.values()):
        return "give it integers only"
    return ""


def _is_whole(key: str, value: Mapping[str, Any]) -> bool:
    """Whether a range has integers only: as its setting, or as its bounds where the setting
    may be anything."""
    if setting := settings().get(key):
        return not setting.takes("number")
    return isinstance(value["low"], int) and isinstance(value["high"], int)


def _refused(
    key: str, space: Stated, recipe: Path, overrides: Sequence[str]
) -> Iterator[Problem]:
    """The first objection of the recipe's schema to the bounds or choices of a setting."""
    place, value = space.place((key,)), space.data[key]
    inside: Sequence[str | int] = ("low", "high")
    if isinstance(value, list):
        inside = range(len(value))
    setting = settings().get(key)
    if isinstance(value, dict) and setting and not setting.takes("integer", "number"):
        fix = f"write choices: {key}: [VALUE, VALUE]"
        yield Problem(key, "a range", f"choices of {setting.allowed}", fix, *place)
        return
    path: KeyPath = tuple(key.split("."))
    for part in inside:
        places = {path[:end]: place for end in range(len(path) + 1)}
        written = {path: space.written.get((key, part), "")}
        one = Stated(nested({key: value[part]}), places, written)
        if problem := refused_value(recipe, overrides, one):
            yield problem
            return


def _parameter(key: str, value: Any) -> Parameter:
    if isinstance(value, list):
        return Parameter(key, choices=tuple(map(in_yaml, value)))
    return Parameter(key, **value, whole=_is_whole(key, value))
