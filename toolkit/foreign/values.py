"""What the tools whose files are one table of settings have in common: their rows, and a
`Target` that reads and writes by them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.foreign.base import (
    ForeignSetting,
    NotCarried,
    Result,
    Row,
    Settings,
    SettingSource,
    Stated,
    Target,
    TargetKey,
    Unknown,
    as_yaml,
    global_batch,
    number,
    read_settings,
)
from toolkit.foreign.options import unless_off
from toolkit.recipe.describe import settings as recipe_settings
from toolkit.recipe.schema import Recipe

_NO_SUCH = NotCarried("no such value")


def path_stated(key: str, path: object, setting: ForeignSetting) -> Stated:
    """A file of the tool: where it starts is not known, so that a relative one is open."""
    is_certain = Path(str(path)).is_absolute()
    advice = "" if is_certain else "relative to the folder in which the tool starts"
    return Stated(key, path, setting, certain=is_certain, advice=advice)


def indexed(
    key: str, setting: ForeignSetting, paths: Sequence[object], shares: Sequence[float] = ()
) -> list[Result]:
    """One or several sources of Megatron's indexed format. Only training has weights."""
    if len(paths) == 1:
        return [path_stated(f"{key}.prefix", paths[0], setting)]
    sources: list[dict[str, object]] = [{"kind": "megatron", "prefix": path} for path in paths]
    advice = "compare the sources one by one"
    results: list[Result] = [Stated(key, sources, setting, certain=False, advice=advice)]
    if key == "data.train":
        for source, share in zip(sources, shares or [1] * len(paths), strict=False):
            source["weight"] = float(share)
    elif len({*shares}) > 1:
        results.append(NotCarried("validation takes its sources without weights"))
    return results


def validation_share(shares: object) -> float | None:
    """What `969, 30, 1`, shares of training, validation and test, leave to validation, as no
    run tests; None for anything else."""
    numbers = [number(as_yaml(share.strip())) for share in str(shares).split(",")]
    total = sum(share or 0 for share in numbers)
    if None in numbers or not total:
        return None
    return round(1 - (numbers[0] or 0) / total, 12)


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


@dataclass(frozen=True)
class Chosen:
    """A row whose values are words; any other is not carried, for the reason `otherwise`."""

    ours: str
    words: Mapping[Any, object]
    """Theirs → the recipe's; of several for one of the recipe's, the first is written."""
    otherwise: NotCarried = _NO_SUCH
    """`{}` in it stands for the value."""

    def __call__(self, setting: ForeignSetting, settings: Settings) -> Iterable[Result]:
        if isinstance(setting.value, str | bool) and setting.value in self.words:
            return [Stated(self.ours, self.words[setting.value], setting)]
        reason = self.otherwise.reason.replace("{}", setting.written)
        return unless_off(NotCarried(reason, self.ours))(setting, settings) or ()


def value_in(settings: Settings, name: str, default: Any = None) -> Any:
    """The value of a setting, or what the tool takes without it."""
    return settings[name].value if name in settings else default


def is_on(settings: Settings, name: str) -> bool:
    """Whether a switch is stated, and on."""
    return bool(value_in(settings, name))


@contextmanager
def malformed(found: SettingSource, name: str, place: str) -> Iterator[None]:
    """What is inside reads settings, and stops at a value of a type that it cannot have."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        found.unknown.append(Unknown(name, place, "a value of another type belongs here"))


class TableTarget(Target):
    """A tool that reads nothing but its own files, by the rows of one table."""

    numbers: ClassVar[Iterable[str]] = ()
    """Settings that are numbers, and whose rows do not say so."""

    def settings(self, file: JsonFile, recipe: Recipe | None) -> dict[str, ForeignSetting]:
        """What stands in a file, by the names of the table. A key without a value states
        nothing."""
        return {
            name: ForeignSetting(name, value, file.place(name))
            for name, value in file.values.items()
            if value is not None
        }

    def table(self, file: JsonFile, settings: Settings) -> Mapping[str, Row]:
        """The rows for the settings of a file."""
        raise NotImplementedError

    def judge(self, setting: ForeignSetting) -> Unknown | NotCarried | None:
        """What to say of a setting without a row; None where it is right without one."""
        raise NotImplementedError

    def add(
        self, found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
    ) -> None:
        """Add what several settings state together."""

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """See `Target`. A value of another type than the tool takes is named as such."""
        who = (
            "DMT does not read this file: the recipe takes precedence",
            f"{self.tool} reads only its own settings: there they take precedence",
        )
        found = SettingSource(str(file.path), self.kind, who)
        settings = self.settings(file, recipe)
        table = self.table(file, settings)
        for name in [*settings]:
            if self._is_a_word(settings[name], table.get(name, ""), name):
                wrong = settings.pop(name)
                hint = f"{wrong.written} is not a number"
                found.unknown.append(Unknown(wrong.name, wrong.place, hint))
        for name, setting in settings.items():
            with malformed(found, setting.name, setting.place):
                found.add(read_settings(settings, table, self.judge, (name,)))
        found.stated += global_batch(found.stated)
        self.add(found, settings, file, recipe)
        return found

    def _is_a_word(self, setting: ForeignSetting, row: Row, name: str) -> bool:
        """Whether it has no number where the recipe has one."""
        key = row.ours if isinstance(row, TargetKey | Implied) else row
        known = recipe_settings().get(key) if isinstance(key, str) else None
        needs = known is not None and known.allowed.startswith(("a number", "an integer"))
        needs = needs and not (isinstance(row, Implied) and not row.is_number)
        is_open = "$" in setting.written
        return (needs or name in self.numbers) and not is_open and number(setting.value) is None
