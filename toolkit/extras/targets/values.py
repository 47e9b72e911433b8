"""What GPT-NeoX, torchtitan and Megatron-Bridge share: tables in text files, and what a writer
must refuse."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.plan.plan import Plan
from toolkit.recipe.describe import settings as recipe_settings
from toolkit.recipe.schema import Recipe
from toolkit.targets.base import (
    ForeignSetting,
    NotCarried,
    Result,
    Row,
    Rule,
    Settings,
    SettingSource,
    Stated,
    TargetKey,
    Unknown,
    number,
    read_settings,
    shown,
)
from toolkit.targets.facts import values_of

ONLY_MEMORY = NotCarried("memory or speed only: the plan decides it")
_OFF: tuple[object, ...] = (None, False, 0, "", [], {}, "none", "float32", "normal", "packed")
"""Values by which a setting does nothing that no recipe does."""
_BESIDES = """
    name cluster guard launch kernels logging checkpoint evaluation parallel schedule
    model.config model.hub model.revision data.train data.validation data.tokenizer
    data.cache data.streaming data.remote_cache_gib data.special_tokens training.steps
    training.tokens training.epochs training.deterministic data.tokenizer_revision
    data.validation_fraction fp8
"""
"""Settings that a writer handles itself, or that do not change what is learned."""


def changes(what: str) -> NotCarried:
    """A setting without a counterpart that changes what the run learns."""
    return NotCarried(f"changes training: {what}")


def unless_off(row: NotCarried, *off: object) -> Rule:
    """`row`, unless the setting has a value by which it does nothing."""

    def rule(setting: ForeignSetting, _: Settings) -> list[Result]:
        is_off = any(setting.value == value for value in off or _OFF)
        return [NotCarried("has no effect with this value") if is_off else row]

    return rule


def path_stated(key: str, path: object, setting: ForeignSetting) -> Stated:
    """A file of the tool: where it starts is not known, so that a relative one is open."""
    is_certain = Path(str(path)).is_absolute()
    advice = "" if is_certain else "relative to the folder in which the tool starts"
    return Stated(key, path, setting, certain=is_certain, advice=advice)


def without_chunks(recipe: Recipe) -> Recipe:
    """The recipe to plan for a tool without an interleaved pipeline schedule."""
    if recipe.parallel.virtual_pipeline != "auto":
        return recipe
    parallel = recipe.parallel.model_copy(update={"virtual_pipeline": 1})
    return recipe.model_copy(update={"parallel": parallel})


def chunk_problems(tool: str, plan: Plan) -> Iterator[Problem]:
    """A plan with several model chunks per pipeline stage."""
    if plan.layout.vpp > 1:
        found = str(plan.layout.vpp)
        yield Problem("parallel.virtual_pipeline", found, f"in {tool}, 1", "set it to 1")


def together(*_: object) -> list[Result]:
    """A row of a setting that is read together with others."""
    return []


@dataclass(frozen=True)
class Implied:
    """A rule for one setting of the recipe, from a setting and those that it depends on."""

    ours: str
    meaning: Callable[[Any, Settings], object]
    """Its value, or what to say of the setting; None for nothing."""
    is_number: bool = True
    """Whether the setting is a number where the recipe's is."""

    def __call__(self, setting: ForeignSetting, settings: Settings) -> list[Result]:
        value = self.meaning(setting.value, settings)
        if isinstance(value, NotCarried | Unknown):
            return [value]
        return [] if value is None else [Stated(self.ours, value, setting)]


def read_options(file: Path) -> tuple[frozenset[str], dict[str, Row]]:
    """Every name of a tool, and why some of them are not carried.

    Names stand in lines, after `SECTION:` without it. Those below a line `= REASON` are not
    carried for that reason; those below `! REASON` change training unless they are off; `=`
    alone ends that.
    """
    names: set[str] = set()
    rows: dict[str, Row] = {}
    row: Row = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(("=", "!")):
            reason = line[1:].strip()
            row = NotCarried(reason) if line[0] == "=" else unless_off(changes(reason))
            row = row if reason else ""
        elif not line.startswith("#"):
            section, colon, rest = line.rpartition(":")
            found = [f"{section}.{name}" if colon else name for name in rest.split()]
            names |= {*found}
            rows |= dict.fromkeys(found, row) if row else {}
    return frozenset(names), rows


def value_in(settings: Settings, name: str, default: Any = None) -> Any:
    """The value of a setting, or what the tool takes without it."""
    return settings[name].value if name in settings else default


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings inside nested sections, by dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def without_words(
    settings: Settings, table: Mapping[str, Row], more: Iterable[str] = ()
) -> tuple[dict[str, ForeignSetting], list[Unknown]]:
    """The settings without words where the recipe has a number, and these."""
    kept, wrong = {}, []
    for name, setting in settings.items():
        row = table.get(name, "")
        key = row.ours if isinstance(row, TargetKey | Implied) else row
        known = recipe_settings().get(key) if isinstance(key, str) else None
        needs = known is not None and known.allowed.startswith(("a number", "an integer"))
        if isinstance(row, Implied):
            needs = needs and row.is_number
        is_open = setting.value is None or "$" in setting.written
        if (needs or name in more) and not is_open and number(setting.value) is None:
            hint = f"{setting.written} is not a number"
            wrong.append(Unknown(setting.name, setting.place, hint))
        else:
            kept[name] = setting
    return kept, wrong


def read_each(
    settings: Settings,
    table: Mapping[str, Row],
    other: Callable[[ForeignSetting], Unknown | None],
) -> SettingSource:
    """`read_settings`, where a value of another type than the tool takes is named as such."""
    found = SettingSource()
    for name, setting in settings.items():
        with malformed(found, setting.name, setting.place):
            found.add(read_settings(settings, table, other, (name,)))
    return found


@contextmanager
def malformed(found: SettingSource, name: str, place: str) -> Iterator[None]:
    """What is inside reads settings, and stops at a value of a type that it cannot have."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        found.unknown.append(Unknown(name, place, "a value of another type belongs here"))


@dataclass(frozen=True)
class JoinedFiles(JsonFile):
    """Several files that a tool reads as one; of a setting in two of them, the last counts."""

    files: tuple[JsonFile, ...] = ()

    @classmethod
    def of(cls, files: Iterable[JsonFile]) -> "JoinedFiles":
        """All settings of the files."""
        files = tuple(files)
        values = {key: value for file in files for key, value in file.values.items()}
        lines = {key: line for file in files for key, line in file.lines.items()}
        return cls(files[0].path, values, lines, files)

    def place(self, key: str) -> str:
        """See `JsonFile`."""
        stating = [file for file in self.files if key in file.lines]
        return stating[-1].place(key) if stating else str(self.path)


def written_rows(
    table: Mapping[str, Row], recipe: Recipe, plan: Plan
) -> Iterator[tuple[str, object]]:
    """Every row of a table that the run has a value for, in the tool's words."""
    values = values_of(recipe, plan)
    for name, row in table.items():
        key = TargetKey(row) if isinstance(row, str) and row else row
        if not isinstance(key, TargetKey) or key.write is None or key.ours not in values:
            continue
        value = key.write(values[key.ours])
        if value is not None:
            yield name, value


def refuse_what_is_not_expressed(
    tool: str,
    recipe: Recipe,
    table: Mapping[str, Row],
    limits: Mapping[str, Iterable[str]],
    more: Iterable[Problem] = (),
) -> None:
    """Raise RecipeError with what the tool cannot express of what the run learns.

    `limits` are the words that it has for some settings.
    """
    rows = [row.ours if isinstance(row, TargetKey) else row for row in table.values()]
    known = {row.partition("[")[0] for row in rows if isinstance(row, str)} | {
        *_BESIDES.split()
    }
    problems = [*more]
    if recipe.total_steps() is None:
        found = f"{recipe.training.epochs:g}"
        problems.append(Problem("training.epochs", found, f"in {tool}, a number of steps"))
    for key, value in leaves(recipe.model_dump(exclude={"model": {"config"}})):
        fix = f"change {key}, or train it with `dmt launch`"
        if key in limits:
            words = (*limits[key],)
            if value not in words:
                allowed = f"in {tool}, {' or '.join(words)}"
                problems.append(Problem(key, shown(value), allowed, fix))
            continue
        if any(key == name or key.startswith(f"{name}.") for name in known):
            continue
        setting = recipe_settings().get(key)
        default = setting.info.get_default() if setting else value
        if value not in (None, (), default) and not (setting and setting.info.is_required()):
            allowed = f"in {tool}, " + (
                "no such setting" if default is None else shown(default)
            )
            problems.append(Problem(key, shown(value), allowed, fix))
    if problems:
        raise RecipeError(problems)
