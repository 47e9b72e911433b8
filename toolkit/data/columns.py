"""The columns of rows with an example of their values, and what is wrong with a row's text."""

from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource

CORRECT = "correct it, or leave it out of the data"


@dataclass(frozen=True)
class Broken:
    """Placeholder for a row that cannot be read."""

    why: str


def add_examples(columns: dict[str, object], row: Mapping[str, object]) -> None:
    """Add the columns of a row to `columns`, each with its first value that is not null."""
    for name, value in row.items():
        if columns.get(name) is None:
            columns[name] = value


def is_chat(value: object) -> bool:
    """Whether a value of a column is a list of messages."""
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return not {"content", "value"}.isdisjoint(value[0])


def check_column(source: HfSource, columns: Mapping[str, object]) -> None:
    """Raise DataError unless the column `text_field` is there and holds text.

    `columns` has a value of each column, None where none is known.
    """
    field, value = source.text_field, columns.get(source.text_field)
    if field in columns and (value is None or isinstance(value, str)):
        return
    texts = [name for name, example in columns.items() if isinstance(example, str)]
    fix = "set `text_field` to the column that holds the text"
    if texts:
        fix = f"set `text_field` to a column of text, of {', '.join(texts)}"
    if field in columns:
        found = f"column `{field}` of `{source.path}` holds {_named(value)}, not text"
    else:
        found = f"`{source.path}` has no column `{field}`; its columns are "
        found += ", ".join(columns) or "none"
    if chat := next((name for name, example in columns.items() if is_chat(example)), None):
        found += f"; `{chat}` holds chats"
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
    kinds = {list: "a list", dict: "a map", bool: "a boolean", bytes: "bytes"}
    return kinds.get(type(value), "a number")
