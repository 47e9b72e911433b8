"""Reading the files of a run directory again: each is readable as a whole, or is not."""

from pathlib import Path
from typing import Any

from toolkit.errors import RecipeError
from toolkit.recipe import yaml_text
from toolkit.run import jsonl
from toolkit.system.untrusted import parse_json

_WHOLE = ("rank", "world", "step", "exit_code", "slow_rank")
"""What all readers of an event compute with."""
_SIDES = ("predicted", "measured", "measured_over_predicted")


def read_events(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """The events from byte `offset` on; what is none is left out, as by every reader."""
    return [event for line in jsonl.read(path, offset) if (event := valid_event(line))]


def valid_event(line: dict[str, Any]) -> dict[str, Any] | None:
    """The event of a line of events.jsonl; None for another line."""
    whole = all(isinstance(line.get(key), int | None) for key in _WHOLE)
    sides = all(isinstance(line.get(key, {}), dict) for key in _SIDES)
    return line if whole and sides and isinstance(line.get("kind"), str) else None


def parse_mapping(text: str | bytes) -> dict[str, Any]:
    """The names and values in JSON text. Raises ValueError for anything else."""
    return _mapping(parse_json(text))


def parse_recipe(text: str) -> dict[str, Any]:
    """The values of a recorded recipe, within the bounds of a user's. Raises ValueError."""
    try:
        stated, problems = yaml_text.parse(text, "recipe.yaml")
    except RecipeError as error:
        problems = list(error.problems)
    if problems:
        raise ValueError(f"line {problems[0].line}: found {problems[0].found}")
    return _mapping(stated.data)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("not a mapping of names to values")
    return value
