"""The findings of the checks, and what they ask: code that may crash, hang or print runs in a
separate process, with a time limit."""

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warning", "problem"]
"""`problem`: the recipe (without one: every recipe) cannot run here. `warning`: it runs, but
not as well as it could, or other recipes do not."""

IMPORT_LIMIT_S = 120.0
"""A first import from a network file system takes a minute."""


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
    """The cost of leaving it so, in one line. Empty only if `level` is ok."""
    fix: str = field(default="", kw_only=True)
    """The command that fixes it. Empty only if `level` is ok."""
    needed_by: str | None = field(default=None, kw_only=True)
    """The recipe's setting that needs it. None if nothing does, or without a recipe."""

    def __post_init__(self) -> None:
        assert (self.fix and self.cost) or self.level == "ok", f"{self.name} has no fix or cost"


def lacking(name: str, found: str, *, cost: str, fix: str, needed_by: str | None) -> Finding:
    """A missing part: a problem if the recipe needs it, otherwise a warning."""
    level: Level = "problem" if needed_by else "warning"
    return Finding(name, level, found, cost=cost, fix=fix, needed_by=needed_by)


@dataclass(frozen=True)
class Answer:
    """How a process ended."""

    done: bool
    out: str
    """Standard output if it succeeded, otherwise one line that says why not."""


def is_installed(module: str) -> bool:
    """Whether `import MODULE` would find it. For a dotted name, the parents are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent is missing, or is what cannot be imported
        return False


def ask_python(code: str) -> Answer:
    """Run `code` in this Python, for `IMPORT_LIMIT_S` seconds at most."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False,
            timeout=IMPORT_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Answer(False, f"did not answer within {IMPORT_LIMIT_S:g} s")
    if done.returncode == 0:
        return Answer(True, done.stdout)
    if done.returncode < 0:
        return Answer(False, f"killed by signal {-done.returncode}")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return Answer(False, lines[-1][:300] if lines else "no output")
