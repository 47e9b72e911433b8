"""What the columns of rows hold, and what is wrong with a row's text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource

TEXT = "a text"
MESSAGES = "lists of messages"
_MESSAGE = re.compile(r"struct<.*\b(content|value): ")
"""A message in the name of an Arrow type: chats are lists of role and content, or from and
value."""
CORRECT = "correct it, or leave it out of the data"


@dataclass(frozen=True)
class Broken:
    """Placeholder for a row that cannot be read."""

    why: str


def arrow_kinds(schema: Any) -> dict[str, str]:
    """What each column of a `pyarrow.Schema` holds, as `check_column` names it."""
    kinds = {}
    for field in schema:
        # pandas writes its categories as dictionaries.
        kind = str(field.type)
        if kind.startswith("dictionary<"):
            kind = str(field.type.value_type)
        if kind in ("string", "large_string", "string_view"):
            kind = TEXT
        elif kind.startswith(("list<", "large_list<")) and _MESSAGE.search(kind):
            kind = MESSAGES
        kinds[field.name] = kind
    return kinds


def add_kinds(columns: dict[str, str], row: Mapping[str, object]) -> None:
    """Add to `columns` what those of a row of Python values hold, where that is not known."""
    for name, value in row.items():
        if columns.get(name, "null") == "null":
            columns[name] = MESSAGES if _is_chat(value) else _named(value)


def _is_chat(value: object) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return not {"content", "value"}.isdisjoint(value[0])


def check_column(source: HfSource, columns: Mapping[str, str]) -> None:
    """Raise DataError unless the column `text_field` is there and holds text.

    `columns` says what each column holds: TEXT, MESSAGES, `null` where nothing is known.
    """
    kind = columns.get(source.text_field)
    if kind in (TEXT, "null"):
        return
    texts = [name for name, held in columns.items() if held == TEXT]
    fix = "set `text_field` to the column that holds the text"
    if texts:
        fix = f"set `text_field` to a column of text, of {', '.join(texts)}"
    if kind is None:
        found = f"`{source.path}` has no column `{source.text_field}`; its columns are "
        found += ", ".join(columns) or "none"
        chats = [name for name, held in columns.items() if held == MESSAGES]
    else:
        found = f"column `{source.text_field}` of `{source.path}` holds {kind}, not text"
        chats = [source.text_field] if kind == MESSAGES else []
    if chats:
        found += f"; `{chats[0]}` holds chats"
        fix = (
            "write `kind: chat` (or `kind: preference`) instead of `kind: hf`, see docs/data.md"
        )
    raise DataError(found, fix=fix)


def wrong_text(row: object, column: str) -> str | None:
    """Why the `column` of a row is not text or null. None if it is."""
    if isinstance(row, Broken):
        return row.why
    if not isinstance(row, dict):
        return f"it is {_named(row)}, not an object with the column `{column}`"
    text = row.get(column)
    if text is None:
        return None
    if not isinstance(text, str):
        return f"`{column}` holds {_named(text)}, not text"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"`{column}` holds half a surrogate pair at character {error.start + 1:,}"
    return None


def _named(value: object) -> str:
    if value is None:
        return "null"
    kinds = {str: "a text", list: "a list", dict: "a map", bool: "a boolean"}
    return kinds.get(type(value), "a number")
