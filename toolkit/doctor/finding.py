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
    """Which check: `packages`, `accelerators`, `programs`, `network` or `storage`."""
    name: str
    level: Level
    found: str
    """One line."""
    cost: str = field(default="", kw_only=True)
    """What it costs to leave it so, in one line; never empty unless `level` is ok."""
    fix: str = field(default="", kw_only=True)
    """The command that fixes it; never empty unless `level` is ok."""
    needed_by: str | None = field(default=None, kw_only=True)
    """The recipe's setting that needs it; None if nothing does, or without a recipe."""

    def __post_init__(self) -> None:
        assert (self.fix and self.cost) or self.level == "ok", f"{self.name} has no fix or cost"

    @property
    def blocks(self) -> bool:
        """Whether it prevents the chosen recipe (without one: every recipe) from running."""
        return self.level == "problem" and self.needed_by is not None


def lacking(
    name: str, found: str, *, cost: str, fix: str, needed_by: str | None, otherwise: Level
) -> Finding:
    """Something missing: a problem if it is needed, otherwise of level `otherwise`."""
    level: Level = "problem" if needed_by else otherwise
    return Finding(name, level, found, cost=cost, fix=fix, needed_by=needed_by)
