"""SPACE.yaml: which settings of a recipe a search varies, as Optuna's distributions.

```yaml
optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
schedule.warmup_steps: {low: 0, high: 100, step: 10}
optimizer.weight_decay: [0.0, 0.01, 0.1]
```

Optuna judges a range. The recipe judges each point before it is trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import Problem, RecipeError
from toolkit.intake.layers import OVERRIDE_FILE
from toolkit.intake.load import load_recipe
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.words import settings
from toolkit.recipe.yaml_text import MAX_BYTES, WHOLE_FILE, parse
from toolkit.system.install import optional
from toolkit.system.untrusted import read_bytes
from toolkit.text.dotted import is_within

Space = dict[str, Any]
"""Optuna's distribution of each setting. Choices as a recipe states them, on one line."""

_EXAMPLE = "optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}"
_FORM = "a list of two or more choices, or {low, high} with low < high, and log or step"
_SAME_FOR_ALL = (
    *("cluster", "name", "launch", "logging", "checkpoint", "evaluation", "dpo", "orpo"),
    *("data.validation", "data.validation_fraction", "data.tokenizer"),
    *("training.steps", "training.tokens", "training.epochs", "training.sequence_length"),
    *("training.precision", "training.objective"),
)
"""Settings that decide what a loss means, and those that do not change what is learned."""


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """`KEY=VALUE` texts, as of `--set`, for a point of a space."""
    return [
        f"{key}={value if isinstance(value, str) else in_yaml(value)}"
        for key, value in values.items()
    ]


def suggest(trial: Any, key: str, distribution: Any) -> None:
    """Let an Optuna trial choose a value. A trial that has one keeps it."""
    choices = getattr(distribution, "choices", None)
    if choices is not None:
        trial.suggest_categorical(key, choices)
        return
    suggested = trial.suggest_int if isinstance(distribution.low, int) else trial.suggest_float
    low, high = distribution.low, distribution.high
    suggested(key, low, high, step=distribution.step, log=distribution.log)


def load_space(path: Path, recipe: Path, overrides: Sequence[str] = ()) -> Space:
    """Read a space, and judge it by the recipe that is searched.

    Raises RecipeError with every mistake in it, or if it cannot be read; BackendUnavailable
    without Optuna.
    """
    try:
        root, problems = parse(read_bytes(path, MAX_BYTES).decode("utf-8-sig"), str(path))
    except (OSError, ValueError) as error:
        fix = f"name a YAML file, for example with `{_EXAMPLE}`"
        raise RecipeError(
            [Problem(WHOLE_FILE, str(error), "a file", fix, str(path))]
        ) from error
    if not isinstance(root.data, dict) or not root.data:
        fix = f"write for example `{_EXAMPLE}`"
        wrong = Problem(WHOLE_FILE, "none", "a map of settings", fix, str(path), 1)
        raise RecipeError([*problems, wrong])
    space: Space = {}
    for key, value in root.data.items():
        try:
            space[key] = _distribution(key, value)
        except (TypeError, ValueError) as error:
            place = root.place((key,))
            problems.append(Problem(key, in_yaml(value), _FORM, str(error), *place))
    if problems:
        raise RecipeError(problems)
    _check_ends(path, root.data, recipe, overrides)
    return space


def _distribution(key: str, value: Any) -> Any:
    """The distribution of a setting. Raises TypeError or ValueError for what is no range and no
    choices. Its text is the fix."""
    distributions = optional("optuna", "tune", "dmt tune: optuna").distributions
    if is_within(key, _SAME_FOR_ALL):
        raise ValueError("remove it: it must be the same in all trials")
    if isinstance(value, list):
        choices = tuple(map(in_yaml, value))
        if len({*choices}) < max(2, len(choices)):
            raise ValueError(f"write different choices; for one value use --set {key}=VALUE")
        return distributions.CategoricalDistribution(choices)
    if not isinstance(value, dict):
        raise ValueError(f"for one value use --set {key}={in_yaml(value)}")
    kinds = {type(one) for name, one in value.items() if name != "log"}
    if not {"low", "high"} <= value.keys() or not kinds <= {int, float}:
        raise ValueError("give `low` and `high` a number each; `log` and `step` are optional")
    if not isinstance(value.get("log", False), bool):
        raise ValueError("give `log` true or false")
    setting = settings().get(key)
    if setting and not setting.takes("integer", "number"):
        raise ValueError(f"write choices: {key}: [VALUE, VALUE]")
    whole = not setting.takes("number") if setting else kinds == {int}
    if not whole:
        return distributions.FloatDistribution(**value)
    if kinds != {int}:
        raise ValueError("give it integers only")
    return distributions.IntDistribution(**value)


def _check_ends(
    path: Path, stated: Mapping[str, Any], recipe: Path, overrides: Sequence[str]
) -> None:
    """Raise the recipe's own error if it takes neither all first values nor all last ones.
    Other points are judged when they are to be trained."""
    ends = {
        key: value if isinstance(value, list) else (value["low"], value["high"])
        for key, value in stated.items()
    }
    problems: Sequence[Problem] = ()
    for end in (0, -1):
        point = {key: values[end] for key, values in ends.items()}
        try:
            load_recipe(recipe, [*overrides, *overrides_of(point)])
            return
        except RecipeError as error:
            problems = error.problems
    raise RecipeError(
        [replace(one, file=str(path)) if one.file == OVERRIDE_FILE else one for one in problems]
    )
