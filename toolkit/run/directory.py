"""The run directory: the files that a run reads and writes."""

import errno
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import Problem, RecipeError
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import Recipe
from toolkit.removed import removed
from toolkit.run import jsonl
from toolkit.run.changes import ON_REQUEST, changes, may_change, parse_recipe, shown
from toolkit.run.environment import environment_report
from toolkit.run.events import EventLog
from toolkit.system.atomic import write_atomically
from toolkit.system.untrusted import read_bytes
from toolkit.text.dotted import is_within
from toolkit.text.redact import redact

_OTHER = "--run-dir OTHER"
_GONE = f"{_OTHER} for a new run; a release that has this setting can continue the old one"


class _Inside:
    """A file or folder of the run directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, run: "RunDirectory", owner: object = None) -> Path:
        return run.path.joinpath(*self._parts)


@dataclass(frozen=True)
class RunDirectory:
    """Typed paths of a run directory. `create` fills it, workers only read it."""

    path: Path

    recipe = _Inside("recipe.yaml")
    """The resolved recipe, every default written out."""
    plan = _Inside("plan.json")
    """The plan, created once for every rank and restart."""
    command = _Inside("command.txt")
    """The command of each start, quoted for a shell, one per line."""
    lock = _Inside("lock")
    """Locked by rank 0 while the run lasts. Names its holder."""
    environment = _Inside("environment.json")
    """Versions of what the last start ran with."""
    metrics = _Inside("metrics.jsonl")
    """One JSON object per logged step."""
    events = _Inside("events.jsonl")
    """One JSON object per event."""
    reference = _Inside("reference.json")
    """Identifies the weights of the reference model of `dpo`: the run's initial weights."""
    logs = _Inside("logs")
    wandb = _Inside("wandb")
    tensorboard = _Inside("tensorboard")
    checkpoints = _Inside("checkpoints")
    export = _Inside("export")
    handed_over = _Inside("launch", "recipe.yaml")
    """The recipe that `dmt launch` leaves for ranks that plan it themselves."""

    def engine_config(self, engine: str) -> Path:
        """The engine's complete configuration (`deepspeed.json`, `fsdp.json`, …)."""
        return self.path / f"{engine}.json"

    def tracker_state(self, tracker: str) -> Path:
        """The run's id at a tracker and what was posted. Outside its folder, whose removal it
        survives."""
        return self.path / f"{tracker}.json"

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: Recipe,
        plan: Mapping[str, Any],
        command: Sequence[str],
        engine_config: Mapping[str, Any],
    ) -> "RunDirectory":
        """Write recipe, plan and configuration. Continue in the directory of the same run.

        Every file is replaced in one step and holds no secret: texts go through
        redaction first. Raises RecipeError when `path` cannot be a directory, or when it
        belongs to a run whose recipe differs in more than `MAY_CHANGE`.
        """
        run = cls(path)
        refuse_other_run(run, recipe)
        _make_folders(run)
        before = ""
        with suppress(OSError):
            before = read_bytes(run.command).decode(errors="backslashreplace")
        files = {run.plan: jsonl.document(plan)}
        if engine_config:
            files[run.engine_config(plan["engine"])] = jsonl.document(engine_config)
        files[run.environment] = jsonl.document(environment_report())
        # Masked word by word, before quoting could split a secret.
        words = shlex.join(map(redact, command))
        files[run.command] = f"{before}{redact(words)}\n"
        # Last: a directory with a recipe is a complete one.
        files[run.recipe] = redact(dump_recipe(recipe))
        for path, text in files.items():
            try:
                write_atomically(path, text)
            except OSError as error:  # e.g. a full disk
                raise not_writable(path, error) from error
        return run


def _make_folders(run: RunDirectory) -> None:
    try:
        for folder in (run.path, run.logs, run.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise not_writable(Path(error.filename or run.path), error) from error


def not_writable(path: Path, error: OSError) -> RecipeError:
    """The error if a file of the run directory cannot be written."""
    found = f"{path} ({error.strerror})"
    return RecipeError([Problem("--run-dir", found, "a folder that can be written", _OTHER)])


def refuse_other_run(run: RunDirectory, recipe: Recipe, requested: Sequence[str] = ()) -> None:
    """Raise RecipeError when the directory belongs to a run with another recipe, `requested`
    settings left out.

    A run that ended before training started (e.g. because of a malformed row) may restart with
    a fixed recipe.
    """
    try:
        if not run.recipe.exists() or _never_began(run):
            return
    except OSError as error:  # e.g. a name that is too long
        raise not_writable(Path(error.filename or run.path), error) from error
    problems = [
        Problem(
            key=key,
            found=shown(new_value),
            allowed=f"{shown(old_value)}, as in the run that {run.path} belongs to",
            fix=_fix(key, old_value, new_value),
        )
        for key, old_value, new_value in changes(*_stored_and_new(run, recipe))
        if not may_change(key)
        and not is_within(key, requested)
        and not was_requested(run, key, new_value)
    ]
    # With a removed setting the run cannot resume, whatever the fixes of the others say.
    if gone := [one for one in problems if one.fix == _GONE]:
        raise RecipeError(gone)
    if problems:
        raise RecipeError(problems)


def _fix(key: str, old: object, new: object) -> str:
    maps = [one for one in old if isinstance(one, dict)] if isinstance(old, list) else []
    keys = {key, *(f"{key}.{name}" for one in maps for name in one)}
    if not keys.isdisjoint(removed().settings):
        return _GONE
    change = f", or --change {key}={shown(new)}" if is_within(key, ON_REQUEST) else ""
    return f"{_OTHER} for a new run, or {key}: {shown(old)} to resume{change}"


def request_changes(run: RunDirectory, recipe: Recipe, keys: Sequence[str], step: int) -> None:
    """Record in the run's events that it continues after `step` with the recipe's values of
    `keys`.

    Raises RecipeError for a setting that is not in ON_REQUEST, without a run, or if another
    setting differs, too.
    """
    for key in keys:
        if not is_within(key, ON_REQUEST):
            raise _not_changeable(key, ", ".join(ON_REQUEST), "--set, in a run of its own")
    if not run.recipe.exists():
        found = f"{run.path}, in which no run has begun"
        raise _not_changeable(found, "the directory of a run that continues", "--set instead")
    refuse_other_run(run, recipe, keys)
    for key, before, now in changes(*_stored_and_new(run, recipe)):
        if is_within(key, keys):
            message = f"{key} was {shown(before)}, is {shown(now)}"
            EventLog(run.events).write("change", step=step, key=key, now=now, message=message)


def _stored_and_new(run: RunDirectory, recipe: Recipe) -> tuple[Any, Any]:
    """The recipe of the directory's run and this one, as plain data. Raises RecipeError."""
    try:
        stored = parse_recipe(read_bytes(run.recipe).decode())
    except (OSError, ValueError) as error:
        found = f"{run.recipe}, which is not a recipe ({error})"
        allowed = "the directory of this run, or a new one"
        raise RecipeError([Problem("--run-dir", found, allowed, _OTHER)]) from error
    return stored, parse_recipe(redact(dump_recipe(recipe)))


def was_requested(run: RunDirectory, key: str, value: object) -> bool:
    """Whether the last `--change` of a setting asked for this value."""
    events = [event for event in jsonl.read(run.events) if event.get("kind") == "change"]
    values = [event.get("now") for event in events if event.get("key") == key]
    return bool(values) and values[-1] == value


def _not_changeable(found: str, allowed: str, fix: str) -> RecipeError:
    return RecipeError([Problem("--change", found, allowed, fix)])


def _never_began(run: RunDirectory) -> bool:
    kinds = {event.get("kind") for event in jsonl.read(run.events)}
    return "end" in kinds and "start" not in kinds
