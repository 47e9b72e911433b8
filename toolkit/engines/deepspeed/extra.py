"""`parallel.zero.extra`: settings of DeepSpeed's `zero_optimization` in a recipe.

The names and types are DeepSpeed's own (`keys.py`). Settings that have a recipe key are
refused, and nested blocks belong in a JSON file named by `parallel.zero.config`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.engines.deepspeed.config import OWNED, REQUIRED, ZERO, open_config, same
from toolkit.engines.deepspeed.keys import KNOWN_KEYS, ZERO_POSITIVE, ZERO_SIZES, ZERO_SWITCHES
from toolkit.engines.deepspeed.presets import PRESETS
from toolkit.errors import Problem, RecipeError
from toolkit.recipe.schema import ZeroSection
from toolkit.text.suggest import did_you_mean

_KEY = "parallel.zero.extra"
_RECIPE_KEYS: Mapping[str, str] = {
    name.split(".")[1]: key
    for name, key in [*OWNED.items()][::-1]  # of a block, the key of its device
    if name.startswith(f"{ZERO}.")
}
"""Settings that the recipe decides, and its key for each."""


def checked_extra(zero: ZeroSection) -> dict[str, bool | int]:
    """The settings as DeepSpeed takes them: `5.0e8` is 500000000.

    Raises RecipeError with every unknown key, wrong type, key that the recipe has another name
    for, value that changes the loss, and disagreement with the file of `parallel.zero.config`.
    """
    extra = zero.extra or {}
    values = {name: _plain(name, value) for name, value in extra.items()}
    if found := [*_wrong(extra, values), *_stated_twice(values, zero.config)]:
        raise RecipeError(found)
    return {name: value for name, value in values.items() if value is not None}


def _plain(name: str, value: object) -> bool | int | None:
    """The value converted to the key's type; None if it is not valid for it."""
    if name in ZERO_SWITCHES:
        return value if isinstance(value, bool) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not value.is_integer():
        return None
    return int(value) if value >= _least(name) else None


def _least(name: str) -> int:
    return 1 if name in ZERO_POSITIVE else 0


def _wrong(extra: Mapping[str, Any], values: Mapping[str, object]) -> Iterator[Problem]:
    """Keys and values that are never valid, independently of other settings."""
    plain = ZERO_SWITCHES | ZERO_SIZES
    for name, value in extra.items():
        key, required = f"{_KEY}.{name}", REQUIRED.get(f"{ZERO}.{name}")
        if name in _RECIPE_KEYS:
            allowed = "keys of zero_optimization that the recipe has no key for"
            yield Problem(key, _shown(value), allowed, f"write `{_RECIPE_KEYS[name]}`")
        elif name not in plain:
            yield _unusable(key, name, value)
        elif values[name] is None:
            allowed = f"an integer ≥ {_least(name)}"
            if name in ZERO_SWITCHES:
                allowed = "true or false"
            yield Problem(key, _shown(value), allowed, "remove it for the preset's value")
        elif required is not None and not same(values[name], required):
            allowed = f"{_shown(required)}: any other value changes or corrupts the loss"
            yield Problem(key, _shown(value), allowed, "remove it")


def _unusable(key: str, name: str, value: object) -> Problem:
    """A block, or a name that DeepSpeed does not know."""
    if name in KNOWN_KEYS[ZERO]:
        fix = "state it in a JSON file, and name that in parallel.zero.config"
        return Problem(key, _shown(value), "keys with a plain value", fix)
    fix = did_you_mean(name, ZERO_SWITCHES | ZERO_SIZES, "remove it")
    return Problem(key, "an unknown key", f"a key that DeepSpeed knows in {ZERO}", fix)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _stated_twice(values: Mapping[str, object], config: str | None) -> Iterator[Problem]:
    """Settings with another value in the user's own file; a preset has only defaults."""
    if config is None or config in PRESETS:
        return
    file = open_config(config)
    block = file.values.get(ZERO)
    for name, value in values.items():
        there = block.get(name) if isinstance(block, Mapping) else None
        if there not in (None, "auto") and value is not None and not same(there, value):
            place = file.place(f"{ZERO}.{name}")
            allowed = f"{_shown(there)}, as {place} has it"
            yield Problem(f"{_KEY}.{name}", _shown(value), allowed, "remove one of the two")
