"""How rows used to be read: `_READING` 0 of `toolkit/data/chat/tokens.py`.

A run whose rows were read like this continues; `ChatReport.newly_read` counts the others.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.data.chat.conversations import NOT_TRAINED, form_of
from toolkit.recipe.schema import ChatSource, ColumnName, PreferenceSource

_READ_BEFORE: dict[str, tuple[ColumnName, ...]] = {
    "messages": ("messages", "tools"),
    "sharegpt": ("conversations", "tools", "system"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "alpaca": ("instruction", "output", "input", "system"),
    "preference": ("prompt", "chosen", "rejected", "tools"),
}


def as_read_before(
    row: Mapping[str, Any], source: ChatSource | PreferenceSource
) -> dict[str, Any]:
    """The row as `_READING` 0 saw it: without null keys at any
    depth, and without what it ignored."""
    names = {source.column(name) for name in _READ_BEFORE[form_of(row, source)]}
    return {
        name: [_without_loss(one) for one in value] if isinstance(value, list) else value
        for name, value in without_nulls(row).items()
        if name in names
    }


def _without_loss(turn: Any) -> Any:
    if isinstance(turn, dict):
        return {key: value for key, value in turn.items() if key not in NOT_TRAINED}
    return turn


def without_nulls(value: Any) -> Any:
    """The value without any null key; rows used to be read so, arguments and tools too."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
