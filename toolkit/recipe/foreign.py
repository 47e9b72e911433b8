"""Settings of other tools, by the name a user knows: what they are called here.

Only error texts use these names. A foreign name is never accepted. Names in the files of other
tools have rows in the tables of `toolkit/foreign`. Names without a row, and values, are rows of
`foreign.yaml`, which is read when a recipe has an unknown one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from toolkit.optimizers.base import OPTIMIZERS
from toolkit.removed import removed


@dataclass(frozen=True)
class Foreign:
    """Which setting of ours stands for a setting of another tool."""

    target: str | None
    """Dotted path of our setting. None when there is none, because it is derived."""
    note: str = ""
    """How to translate the value, or why there is no such setting."""

    @property
    def advice(self) -> str:
        """One line for the `fix` of an error."""
        if self.target is None:
            return self.note
        return f"write `{self.target}`" + (f" ({self.note})" if self.note else "")


@cache
def _tables() -> dict[str, Any]:
    tables: dict[str, Any] = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))
    return tables


@cache
def foreign_names() -> Mapping[str, Foreign]:
    """Our settings by names that no table of `toolkit/foreign` has."""
    return {
        name: Foreign(row["setting"], row.get("note", ""))
        for row in _tables()["names"]
        for name in row["theirs"].split()
    }


@cache
def foreign_values() -> Mapping[str, Mapping[str, str]]:
    """Values of other tools, lowercase, by our setting: what they are called here."""
    optimizers = {alias: name for name, kind in OPTIMIZERS.items() for alias in kind.aliases}
    return {**_tables()["values"], "optimizer.name": optimizers}


def value_advice(key: str, value: object) -> str:
    """What to do instead of a value that this release lacks. Empty for any other."""
    text = str(value).lower()
    each: Iterator[Any] = (one.get(key, {}) for one in (removed().values, _tables()["advice"]))
    return next((one[text] for one in each if text in one), "")


def value_fix(key: str, value: object) -> str:
    """The fix of a value that another tool has, or that this release lacks. Empty otherwise."""
    ours = foreign_values().get(key, {}).get(str(value).lower())
    return f"write {ours}" if ours else value_advice(key, value)


@cache
def carried() -> Mapping[str, str]:
    """Our settings by the names that have a row in a table of `toolkit/foreign`."""
    found: dict[str, str] = {}
    for file in sorted((Path(__file__).parents[1] / "foreign").glob("*.yaml")):
        for name, row in YAML(typ="safe").load(file)["carry"].items():
            to = row.get("to", "") if isinstance(row, dict) else row
            ours = (to[0] if isinstance(to, list) else to).partition("[")[0]
            if "." in ours and "." not in name:
                found.setdefault(name.lstrip("-").replace("-", "_"), ours)
    return found


def foreign(name: str) -> Foreign | None:
    """Find our name of a foreign setting by its name or, where that is short, with its
    section. Dashes, case and leading `--` do not matter."""
    name = name.lstrip("-").replace("-", "_").lower()
    ours = carried().get(name)
    return foreign_names().get(name) or (Foreign(ours) if ours else None)
