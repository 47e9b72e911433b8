"""Carries another tool's settings into a recipe's, by the tool's table (`tables.py`)."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from toolkit.errors import Problem, RecipeError
from toolkit.foreign.tables import ForeignRow, ForeignTool
from toolkit.recipe.dump import in_yaml
from toolkit.recipe.foreign import foreign, foreign_values
from toolkit.recipe.schema import Recipe
from toolkit.recipe.section import Section, legal_name
from toolkit.recipe.words import settings as recipe_settings
from toolkit.recipe.yaml_text import resolve_plain
from toolkit.text.redact import redact
from toolkit.text.suggest import did_you_mean
from toolkit.text.terminal import printable
from toolkit.text.units import shortened

ACCUMULATION, WORLD, PER_RANK = "accumulation", "world", "batch_per_rank"
DEEPSPEED_BATCH, SHARDS = "deepspeed_batch", "shards"
DERIVED = (ACCUMULATION, WORLD, PER_RANK, DEEPSPEED_BATCH, SHARDS)
"""Numbers that a recipe derives, and other tools state."""
RSLORA = "rslora"
"""Whether another tool divides `adapter.alpha` by √rank. A recipe divides it by the rank."""
AUTO = "auto"
OFF: tuple[object, ...] = (None, False, 0, "", "none", "no", "false", [], {})
"""Values with which a setting does nothing."""
TRACKERS = "logging.trackers"
"""A list to which several settings add."""
LEAVE_OUT = "remove it from the file, and write it in the recipe"
OTHER_RUN = "DMT trains other objectives and methods than this: use the tool for this file"
_LONGEST = 60


@dataclass(frozen=True)
class ForeignSetting:
    """One setting as it stands in a file."""

    name: str
    value: Any
    file: str
    line: int = 0

    @property
    def place(self) -> str:
        """`FILE:LINE`. Only the file where the line is unknown."""
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def written(self) -> str:
        """The value on one line, without credentials."""
        return shortened(printable(redact(in_yaml(self.value))), _LONGEST)

    def problem(self, expected: str, fix: str = LEAVE_OUT) -> Problem:
        """A mistake in it."""
        return Problem(self.name, self.written, expected, fix, self.file, self.line)


Settings = Mapping[str, ForeignSetting]
"""The settings of one file by the names of the tool's table."""


@dataclass(frozen=True)
class Carried:
    """A value of the recipe, and the setting that states it."""

    value: Any
    at: ForeignSetting
    note: str = ""
    also: tuple[Any, ...] = ()
    """Further values of the recipe that the setting describes."""


@dataclass(frozen=True)
class Left:
    """A setting that the recipe does not have."""

    at: ForeignSetting
    reason: str
    changes: bool = True
    """Whether something that is learned depends on it."""
    unknown: bool = False
    """Whether the tool does not know it."""


@dataclass
class Found:
    """What one file states, or several together, by the recipe's keys."""

    tools: tuple[ForeignTool, ...] = ()
    values: dict[str, Carried] = field(default_factory=dict)
    weak: list[tuple[str, Carried]] = field(default_factory=list)
    """Statements of settings that are off: some value among `Carried.also`."""
    left: list[Left] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    context: dict[str, Any] = field(default_factory=dict)
    """Values of their settings, with what the tool assumes."""
    defaults: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, ForeignSetting] = field(default_factory=dict)
    """Settings of a model in megatron-core's terms."""

    def put(
        self, key: str, value: Any, at: ForeignSetting, note: str = "", also: Sequence[Any] = ()
    ) -> None:
        """Carry a value. Of two in one file, the first counts. Trackers add up."""
        value, expected = fitting(key, value)
        if expected:
            self.problems.append(at.problem(f"{key} is {expected}"))
            return
        self._take(key, Carried(value, at, note, (*also,)), one_file=True)

    def _take(self, key: str, one: Carried, *, one_file: bool) -> None:
        """Take over a value. Of two that differ, the first of one file counts. Two files
        contradict each other."""
        first = self.values.setdefault(key, one)
        if first.at == one.at or same(first.value, one.value) or first.value in one.also:
            return
        if key == TRACKERS:
            both = [*dict.fromkeys([*first.value, *one.value])]
            self.values[key] = replace(first, value=both)
        elif one_file or first.at.file == one.at.file:
            self.drop(one.at, f"{first.at.name} at {first.at.place} decides {key}")
        else:
            before = f"{first.at.name} at {first.at.place} says: {first.at.written}"
            problem = one.at.problem(f"what {before}", "make both say the same")
            self.problems.append(replace(problem, key=key))

    def drop(self, at: ForeignSetting, reason: str, changes: bool = True) -> None:
        """A setting that is not carried."""
        self.left.append(Left(at, reason, changes))

    def value(self, key: str, default: Any = None) -> Any:
        """A value that was carried."""
        return self.values[key].value if key in self.values else default

    def remove(self, key: str, reason: str) -> None:
        """Take out a value that something else states."""
        if (one := self.values.pop(key, None)) is not None:
            self.drop(one.at, reason)

    def number(self, key: str, default: int = 1) -> int:
        """A whole number that was carried or is a default."""
        value = self.value(key, self.defaults.get(key))
        return value if isinstance(value, int) and value > 0 else default

    def merge(self, other: "Found") -> None:
        """Take over another file's statements. Two that contradict each other are a problem."""
        for key, one in other.values.items():
            self._take(key, one, one_file=False)
        self.weak += other.weak
        self.left += other.left
        self.problems += other.problems
        self.defaults = {**other.defaults, **self.defaults}
        self.shape = {**other.shape, **self.shape}
        self.tools += other.tools

    def settle(self) -> None:
        """Decide what settings that are off leave open: by the tool's default, if they allow
        it."""
        for key in dict.fromkeys(key for key, _ in self.weak):
            every = [one for name, one in self.weak if name == key]
            left = [value for value in every[0].also if all(value in one.also for one in every)]
            if key not in self.values and left and self.defaults.get(key) not in left:
                self.values[key] = Carried(left[0], every[0].at)

    def stop(self) -> None:
        """Raise RecipeError with everything that was not understood."""
        if self.problems:
            raise RecipeError(self.problems)


def carry(tool: ForeignTool, settings: Settings) -> Found:
    """The recipe's values that settings state, by the rows of a table."""
    found = Found((tool,))
    found.context = {**tool.assume, **{name: one.value for name, one in settings.items()}}
    for key, value in tool.defaults.items():
        if not isinstance(value, Mapping):
            found.defaults[key] = value
        elif _holds(value["when"], found.context):
            found.defaults[key] = value["value"]
    # Those that depend on other settings of ours come last.
    for name in sorted(settings, key=lambda name: tool.depends(name)):
        _carry_one(tool, name, settings[name], found)
    return found


def _carry_one(tool: ForeignTool, name: str, at: ForeignSetting, found: Found) -> None:
    row = tool.rows.get(name)
    if not any(same(at.value, one) for one in tool.must_be.get(name, [at.value])):
        words = ", ".join(in_yaml(word) for word in tool.must_be[name] if word != "")
        found.problems.append(at.problem(words, OTHER_RUN))
    elif at.value is None or name in tool.rules:
        return
    elif name in tool.shape or tool.of_other_shape(name):
        found.shape[name] = at
    elif at.value == AUTO and (row is None or AUTO not in (row.words or {})):
        found.drop(at, "another setting states it, or the plan", changes=False)
    elif row is None:
        _leave(tool, name, at, found)
    elif reason := _not_in_effect(row, found):
        found.drop(at, row.otherwise or reason, bool(row.otherwise))
    elif row.needs and row.needs not in found.values:
        if at.value not in OFF:
            found.drop(
                at, f"needs {row.needs}, a number of steps", "checkpoint" not in row.to[0]
            )
    else:
        _put_row(row, at, found)


def _leave(tool: ForeignTool, name: str, at: ForeignSetting, found: Found) -> None:
    """A setting without a row."""
    if name in tool.must_be:
        found.drop(at, "so it is here", changes=False)
    elif why := tool.change(name):
        off = any(same(at.value, value) for value in OFF)
        found.drop(at, "has no effect with this value" if off else why, not off)
    elif tool.ignores(name):
        found.drop(at, "ignored", changes=False)
    else:
        known = [one for one in tool.names if "*" not in one]
        there = foreign(name.rpartition(".")[2])
        hint = did_you_mean(name, known, there.advice if there else "", cutoff=0.8)
        why = f"unknown to DMT, it may change what is learned{'; ' * bool(hint)}{hint}"
        found.left.append(Left(at, why, unknown=True))


def _not_in_effect(row: ForeignRow, found: Found) -> str:
    for name, values in row.when.items():
        if not _holds({name: values}, found.context):
            return f"not in effect: {name} is {in_yaml(found.context.get(name))}"
    if row.unless_when and _holds(row.unless_when, found.context):
        return "not in effect here"
    if row.unless and row.unless in found.values:
        return f"not in effect next to {found.values[row.unless].at.name}"
    return ""


def _holds(when: Mapping[str, list[Any]], context: Mapping[str, Any]) -> bool:
    return all(
        str(context.get(name)).lower() in [str(value).lower() for value in values]
        for name, values in when.items()
    )


def _put_row(row: ForeignRow, at: ForeignSetting, found: Found) -> None:
    value, to = at.value, row.to
    known = row.words is not None and isinstance(value, Hashable) and value in row.words
    if known and row.words is not None:
        value = row.words[at.value]
    elif row.other == "targets":
        value = targets(value)
    elif row.words is not None and row.other != "same":
        if row.changes or row.ignored:
            found.drop(at, row.changes or "ignored", not row.ignored)
        elif any(same(value, off) for off in OFF):
            found.weak += [(key, Carried(None, at, "", row.off)) for key in to if row.off]
            if not row.off:
                found.drop(at, "has no effect with this value", changes=False)
        else:
            words = ", ".join(in_yaml(word) for word in row.words)
            found.problems.append(at.problem(words or "another value"))
        return
    elif row.changes and (number(value) or 0) > 0 and fitting(to[0], value)[1]:
        found.drop(at, row.changes)
        return
    if row.share and isinstance(value, float) and 0 < value < 1:
        to = (row.share,)
    first, *also = value if known and isinstance(value, list) else [value]
    is_map = known and isinstance(value, Mapping)
    if is_map and not value:
        found.drop(at, "states nothing that a recipe has", changes=False)
    stated = dict(value) if is_map else dict.fromkeys(to, first)
    for key, one in {**stated, **({} if is_map else row.more)}.items():
        found.put(key, one, at, also=also)


def targets(value: Any) -> Any:
    """Names of layers with an adapter, from a list or text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    names = [str(name).strip() for name in names]
    return "all-linear" if names in (["all-linear"], ["all"]) else names


def fitting(key: str, value: Any) -> tuple[Any, str]:
    """A value in the recipe's type, or what the recipe takes there."""
    if key in DERIVED:
        is_count = type(value) is int and value > 0
        return value, "" if is_count else "a whole number of 1 or more"
    if key == RSLORA:
        return value, "" if isinstance(value, bool | None) else "true or false"
    name, bracket, _ = key.partition("[")
    setting = recipe_settings().get(name)
    if name == "name":
        return legal_name(str(value), "run"), ""
    if name.startswith(("data.train.", "data.validation.")):
        return value, ""  # judged with the whole recipe
    if bracket or setting is None:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return value, "" if is_number or not bracket else "a number"
    if isinstance(value, str):
        word = value.lower()
        value = (
            foreign_values().get(key, {}).get(word, word if word in setting.choices else value)
        )
        if setting.takes("integer", "number"):
            value = resolve_plain(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = value if setting.takes("number") else int(value)
    if setting.sections:  # judged with the whole recipe
        return value, ""
    try:
        _adapter(name).validate_python(value)
    except (ValidationError, ValueError, OverflowError):
        return value, setting.allowed
    return value, ""


@cache
def _adapter(name: str) -> TypeAdapter[Any]:
    section: type[Section] = Recipe
    *above, last = name.split(".")
    for part in above:
        stated = section.model_fields[part].annotation
        members = (stated, *get_args(stated))
        section = next(one for one in members if hasattr(one, "model_fields"))
    info = section.model_fields[last]
    kind: Any = info.annotation
    for one in info.metadata:
        kind = Annotated[kind, one]
    return TypeAdapter(kind, config=ConfigDict(strict=True))


def same(one: Any, other: Any) -> bool:
    """Whether two values mean the same: 1 is 1.0, and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(same(value, other.get(name)) for name, value in one.items())
    if isinstance(one, int | float) and isinstance(other, int | float):
        scale = max(abs(one), abs(other))
        return one == other or (scale < 1e300 and abs(one - other) <= 1e-9 * scale)
    return bool(one == other)


def number(value: Any) -> float | None:
    """A number. None for anything else, `true` included."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < 1e300 else None


def relative_to_file(name: str, file: Path) -> Path:
    """A file that another one names: from the working directory, else that file's folder."""
    near = file.parent / name
    with suppress(OSError, ValueError):  # no name that a file can have
        return near if not Path(name).exists() and near.exists() else Path(name)
    return Path(name)


def _value(at: ForeignSetting) -> str:
    return "" if at.value is None else f" {at.written}"


def left_lines(left: Sequence[Left]) -> Iterator[str]:
    """Lines about what is not carried: first what changes what is learned, then the rest."""
    said = dict.fromkeys(
        f"  {one.at.name}{_value(one.at)} ({one.at.place}): {one.reason}"
        for one in left
        if one.changes
    )
    if said:
        yield f"CHANGES WHAT IS LEARNED, or is for you to state ({len(said)}):"
    yield from said
    if ignored := [one.at.name for one in left if not one.changes]:
        yield f"ignored ({len(ignored)}): {', '.join(ignored)}"
