"""Rows of settings that need no code, from a text file for each tool (`TOOL_options.txt`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toolkit.foreign.base import (
    NO_EFFECT,
    ForeignSetting,
    NotCarried,
    Result,
    Row,
    Rule,
    Settings,
    TargetKey,
    changes,
)

_OFF: tuple[object, ...] = (None, False, 0, "", [], {}, "none", "float32", "normal", "packed")
"""Values by which a setting does nothing that no recipe does."""


def unless_off(row: NotCarried, *off: object) -> Rule:
    """`row`, unless the setting has a value by which it does nothing."""

    def rule(setting: ForeignSetting, _: Settings) -> list[Result]:
        is_off = any(setting.value == value for value in off or _OFF)
        return [NO_EFFECT if is_off else row]

    return rule


def together(*_: object) -> list[Result]:
    """A row of a setting that is read together with others."""
    return []


@dataclass(frozen=True)
class ToolOptions:
    """A tool's settings, as far as they need no code."""

    names: frozenset[str]
    """Every name that the tool knows."""
    rows: Mapping[str, Row]
    old: Mapping[str, str]
    """Other names of a setting → the one that has a row."""


def read_options(tool: str, module: str) -> ToolOptions:
    """Read the options file of `tool` next to `module`: groups of names, each below a line.

    `= REASON`: no recipe has them. `! REASON`: so, and they change training unless they are
    off. `&`: part of what another row states. `> read and written` and `> read only`: a name
    and the recipe's setting with the same values on each line. `<`: another name of a setting,
    and the one with a row. Before them stand those that have rows elsewhere or none, after
    `SECTION:` without it.
    """
    names: set[str] = set()
    rows: dict[str, Row] = {}
    old: dict[str, str] = {}
    group, reason = "", ""
    text = Path(module).with_name(f"{tool}_options.txt").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line[0] in "=!&><":
            group, reason = line[0], line[2:]
        elif group == "<":
            theirs, now = line.split()
            old[theirs] = now
        elif group == ">":
            theirs, ours = line.split()
            rows[theirs] = ours if reason == "read and written" else TargetKey(ours, write=None)
        elif line[0] != "#":
            section, colon, rest = line.rpartition(":")
            listed = [f"{section}.{name}" if colon else name for name in rest.split()]
            names |= {*listed}
            row: dict[str, Row] = {
                "=": NotCarried(reason),
                "!": unless_off(changes(reason)),
                "&": together,
            }
            rows |= dict.fromkeys(listed, row[group]) if group else {}
    return ToolOptions(frozenset(names), rows, old)
