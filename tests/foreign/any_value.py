"""Files of any content."""

import json
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.foreign.conftest import Planned
from toolkit.errors import DmtError

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 10**400, 10**4000),
    *("", "x", "true", "100", "no", "steps", "cpu", "FSDP", "DEEPSPEED", "{", "{}", "a\0b"),
    *("y" * 5000, "full_shard offload", [], [[]], [{}], [True, "x"], ["wandb", None]),
    *({}, {"A": 1}, {"stage": {}}, {"version": []}, {"min_lr": {}}, {"enabled": [1]}),
)
RUNS = 150


def try_any_value(
    made: Callable[[random.Random], dict[str, Any]], suffix: str, tiny: Planned, folder: Path
) -> None:
    """In YAML, only values that its reader takes, in blocks."""
    chance = random.Random(6)
    compared = 0
    for _ in range(RUNS):
        file = folder / f"file{suffix}"
        values = made(chance)
        file.write_text(json.dumps(values) if suffix == ".json" else in_blocks(values))
        try:
            compared += len(tiny.against(file).compared)
        except DmtError:
            continue
    assert compared > RUNS


def in_blocks(values: dict[str, Any], indent: str = "") -> str:
    """Block YAML of `values`, without numbers and characters that no YAML file may have."""
    lines = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{key}:\n{in_blocks(value, indent + '  ')}")
        elif not isinstance(value, float | int) or abs(value) < 10**15:
            text = json.dumps(value)
            if all(one in string.printable for one in str(value)) and "\\u" not in text:
                lines.append(f"{indent}{key}: {text}\n")
    return "".join(lines)
