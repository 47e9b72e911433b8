"""What the checks report."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")
"""note: good to know. warning: works, but not as well as it could, or not everywhere.
problem: whatever needs it fails."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at on this machine."""

    group: str
    """Which check: `packages`, `accelerators`, `compilers`, `launchers`, `network`,
    `storage` or `accounts`."""
    name: str
    level: Level
    found: str
    """One line."""
    needed_by: str | None = None
    """The recipe's setting that needs it; None where nothing does, or without a recipe."""
    fix: str = ""
    """The command that fixes it; never empty unless `level` is ok."""

    def __post_init__(self) -> None:
        assert self.fix or self.level == "ok", f"{self.group}: {self.name} has no fix"

    @property
    def blocks(self) -> bool:
        """Does it keep the chosen recipe (without one: every recipe) from running?"""
        return self.level == "problem" and self.needed_by is not None


def lacking(
    group: str,
    name: str,
    found: str,
    *,
    fix: str,
    needed_by: str | None,
    otherwise: Level = "note",
) -> Finding:
    """Something that is not there: a problem for who needs it, else as bad as `otherwise`."""
    level: Level = "problem" if needed_by else otherwise
    return Finding(group, name, level, found, needed_by, fix)
