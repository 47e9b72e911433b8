"""The exception tree. Every error that a user can cause is one of these.

    DmtError                     exit code
    ├── RecipeError                2   the recipe is wrong; carries every Problem at once
    ├── PlanError                  2   the recipe cannot be laid out on this cluster
    ├── DataError                  2   the data or the tokenizer does not fit the recipe
    ├── CheckpointError            2   a checkpoint is missing, incomplete or does not match
    ├── DirectoryInUse             2   another run is using the run directory
    ├── BackendUnavailable         3   a package, program, compiler or device is missing
    ├── RunFailed                  4   training started and failed
    └── Stopped                   75   stopped by a signal after saving; start again to resume

The command line prints them without a traceback and exits with `exit_code`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from toolkit.text.terminal import printable

EXIT_DONE = 0
EXIT_USER_ERROR = 2
EXIT_UNAVAILABLE = 3
EXIT_FAILED = 4
EXIT_RESUMABLE = 75


@dataclass(frozen=True)
class Problem:
    """One mistake in a recipe, with everything needed to fix it."""

    key: str
    """Dotted path of the setting, e.g. `parallel.zero.stage`."""
    found: str
    """What the recipe says, as the user wrote it (secrets already masked)."""
    allowed: str
    """What would be accepted."""
    fix: str = ""
    """What to type instead, e.g. 'did you mean `learning_rate`?'."""
    file: str = ""
    """File that states the setting, or '--set' for an override. Empty when unknown."""
    line: int = 0
    """1-based line in `file`. 0 when there is none."""

    def __post_init__(self) -> None:
        """Make every text printable and one line: a recipe's keys and values are in them."""
        for name in ("key", "found", "allowed", "fix", "file"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        if where == self.key:  # `--set` itself
            where = ""
        parts = [f"{self.key}: found {self.found}", f"allowed: {self.allowed}"]
        if self.fix:
            parts.append(f"fix: {self.fix}")
        return f"{where}: " * bool(where) + "; ".join(parts)


class DmtError(Exception):
    """Base of every error that DMT raises on purpose."""

    exit_code: ClassVar[int] = EXIT_USER_ERROR
    """Subclasses state another code. By default the error is the user's mistake."""

    def __init__(self, message: str, *, fix: str = "", retry: bool = True) -> None:
        """`retry`: whether another start may help. If not, `--max-restarts` makes none."""
        super().__init__(message)
        self.message, self.fix, self.retry = message, fix, retry

    def __str__(self) -> str:
        return f"{self.message}\n  fix: {self.fix}" if self.fix else self.message


class RecipeError(DmtError):
    """The recipe is wrong. `problems` holds every mistake found, in file order. `notes` holds
    what is allowed but may not be meant."""

    def __init__(self, problems: Sequence[Problem], notes: Sequence[str] = ()) -> None:
        self.problems, self.notes = tuple(problems), tuple(notes)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class PlanError(DmtError):
    """The recipe is valid, but no legal layout carries it out on this cluster."""


class DataError(DmtError):
    """The data or the tokenizer does not fit the recipe."""


class CheckpointError(DmtError):
    """A checkpoint is missing, incomplete or does not belong to this run."""


class DirectoryInUse(DmtError):
    """Another run is using the run directory."""


class BackendUnavailable(DmtError):
    """A package, program, compiler or device that the run needs is missing."""

    exit_code = EXIT_UNAVAILABLE


class RunFailed(DmtError):
    """Training started and failed."""

    exit_code = EXIT_FAILED


class Stopped(DmtError):
    """A signal stopped the run after it saved. The same command resumes it."""

    exit_code = EXIT_RESUMABLE
