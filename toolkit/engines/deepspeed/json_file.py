"""A JSON file written by a user: parsed strictly, with the line of every setting."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import Problem, RecipeError
from toolkit.recipe import yaml_text
from toolkit.system import untrusted


@dataclass(frozen=True)
class JsonFile:
    """The object in a JSON file, and where each of its settings is stated."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    """1-based line of each dotted key, e.g. `zero_optimization.stage`."""

    def problem(self, key: str, found: object, allowed: str, fix: str = "") -> Problem:
        """A mistake at `key`, placed at its line."""
        shown = json.dumps(found, default=str)
        if len(shown) > 200:
            shown = shown[:200] + "…"
        return Problem(key, shown, allowed, fix, str(self.path), self.lines.get(key, 0))


DEEPSPEED_CONFIG = "DeepSpeed config"
"""Key of a mistake in the whole of DeepSpeed's file, e.g. that it is not there."""


def read_json(path: Path, what: str = DEEPSPEED_CONFIG) -> JsonFile:
    """Read an object from a UTF-8 JSON file. Errors call it `what`.

    Raises RecipeError, with the line, when the file is missing, too large, not JSON, not
    an object, or states a key twice (of which JSON readers silently keep the last).
    """
    try:
        text = untrusted.read_bytes(path, yaml_text.MAX_BYTES).decode("utf-8")
    except OSError as error:
        found = error.strerror or str(error)
        raise _unreadable(path, what, found, "a readable file") from error
    except ValueError as error:  # too large, not UTF-8, or a null character in the path
        raise _unreadable(path, what, str(error), f"a {what} in UTF-8") from error
    return parse_json(text, path, what)


def parse_json(text: str, path: Path, what: str = DEEPSPEED_CONFIG) -> JsonFile:
    """Read an object from JSON text that stands at `path`. Raises as `read_json` does."""
    try:
        values = untrusted.parse_json(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        allowed = "JSON, without comments"
        raise _unreadable(path, what, error.msg, allowed, error.lineno) from error
    except ValueError as error:
        raise _unreadable(path, what, str(error), "JSON with plain finite numbers") from error
    if not isinstance(values, dict):
        raise _unreadable(path, what, type(values).__name__, "an object: { … }", 1)
    stated, problems = yaml_text.parse(text, str(path))  # JSON is YAML, too
    if problems:
        raise RecipeError(problems)
    lines = {yaml_text.dotted(at): place.line for at, place in stated.places.items()}
    return JsonFile(path, values, lines)


def _unreadable(path: Path, what: str, found: str, allowed: str, line: int = 0) -> RecipeError:
    return RecipeError([Problem(what, found, allowed, "", str(path), line)])


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")
