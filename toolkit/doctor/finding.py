"""The findings of the checks."""

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")
"""note: good to know. warning: works, but not as well as it could, or not everywhere.
problem: whatever needs it fails."""


@dataclass(frozen=True)
class Finding:
    """The result of one check of this machine."""

    group: str = field(default="", kw_only=True)
    """Which check: `packages`, `accelerators`, `compilers`, `launchers`, `network`,
    `storage` or `accounts`."""
    name: str
    level: Level
    found: str
    """One line."""
    needed_by: str | None = None
    """The recipe's setting that needs it; None if nothing does, or without a recipe."""
    fix: str = ""
    """The command that fixes it; never empty unless `level` is ok."""

    def __post_init__(self) -> None:
        assert self.fix or self.level == "ok", f"{self.name} has no fix"

    @property
    def blocks(self) -> bool:
        """Whether it prevents the chosen recipe (without one: every recipe) from running."""
        return self.level == "problem" and self.needed_by is not None


def lacking(
    name: str, found: str, fix: str, needed_by: str | None, otherwise: Level = "note"
) -> Finding:
    """Something missing: a problem if it is needed, otherwise of level `otherwise`."""
    return Finding(name, "problem" if needed_by else otherwise, found, needed_by, fix)
