"""Files of any content."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.targets.conftest import Planned
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
    """YAML is a superset of JSON, but has a reader of its own."""
    chance = random.Random(6)
    compared = 0
    for _ in range(RUNS):
        file = folder / f"file{suffix}"
        file.write_text(json.dumps(made(chance)))
        try:
            compared += len(tiny.against(file).compared)
        except DmtError:
            continue
    # YAML's reader refuses most files: for a character, or a number without end.
    assert compared > (RUNS if suffix == ".json" else RUNS / 20)
