"""What the tools whose files are one table of settings have in common: their rows, and a
`Target` that reads and writes by them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.plan.plan import Plan
from toolkit.recipe.describe import settings as recipe_settings
from toolkit.recipe.schema import Recipe
from toolkit.targets.base import (
    ForeignSetting,
    NotCarried,
    PerReplica,
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
    shown,
)
from toolkit.targets.facts import values_of
from toolkit.targets.options import unless_off
from toolkit.text.dotted import leaves

_NO_SUCH = NotCarried("no such value")
_BESIDES = """
    name cluster guard launch kernels logging checkpoint evaluation parallel schedule
    model.config model.hub model.revision data.train data.validation data.tokenizer
    data.cache data.special_tokens training.steps
    training.tokens training.epochs training.deterministic data.tokenizer_revision
    data.validation_fraction fp8
"""
"""Settings that a writer handles itself, or that do not change what is learned."""


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
    write: Callable[[Any], object] | None = None
    """See `TargetKey`."""
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
        return unless_off(NotCarried(reason))(setting, settings) or ()

    def write(self, value: object) -> object:
        """The tool's word."""
        return next((word for word, ours in self.words.items() if ours == value), None)


def value_in(settings: Settings, name: str, default: Any = None) -> Any:
    """The value of a setting, or what the tool takes without it."""
    return settings[name].value if name in settings else default


def is_on(settings: Settings, name: str) -> bool:
    """Whether a switch is stated, and on."""
    return bool(value_in(settings, name))


def per_replica(micro: ForeignSetting) -> Stated:
    """The global batch where a file states none: one micro batch per replica."""
    text = f"{micro.written} · dp"
    at = ForeignSetting(f"{micro.name} · dp", micro.value, micro.place, text)
    return Stated("training.global_batch_size", PerReplica(micro.value), at)


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


class TableTarget(Target):
    """A tool that reads nothing but its own files, by the rows of one table."""

    rendered = True
    numbers: ClassVar[Iterable[str]] = ()
    """Settings that are numbers, and whose rows do not say so."""
    limits: ClassVar[Mapping[str, Iterable[str]]] = {}
    """Words of the recipe that it has, where the table does not say so."""
    interleaves: ClassVar[bool] = False
    """Whether it has a pipeline schedule with several model chunks per stage."""
    notes: ClassVar[tuple[str, ...]] = ()
    """What a written file leaves to the user."""

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
        to = self.tool.lower().removeprefix("the ")
        who = (
            f"DMT does not read this file (`dmt render --to {to}` writes one): the recipe "
            "takes precedence",
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

    def adapt(self, recipe: Recipe) -> Recipe:
        """See `Target`."""
        if self.interleaves or recipe.parallel.virtual_pipeline != "auto":
            return recipe
        return recipe.with_values({"parallel.virtual_pipeline": 1})

    def write(self, recipe: Recipe, plan: Plan) -> tuple[str, Sequence[str]]:
        """See `Target`: what the rows say, and what `values` adds."""
        table = self.table(JsonFile(Path(), {}, {}), {})
        self._refuse(recipe, plan, table)
        rows = dict(written_rows(table, recipe, plan))
        return self.text(recipe, rows | dict(self.values(recipe, plan))), self.notes

    def values(self, recipe: Recipe, plan: Plan) -> Iterable[tuple[str, object]]:
        """Settings that are not one value of the recipe."""
        raise NotImplementedError

    def text(self, recipe: Recipe, values: dict[str, Any]) -> str:
        """The file with these settings."""
        raise NotImplementedError

    def problems(self, recipe: Recipe, plan: Plan) -> Iterable[Problem]:
        """What it cannot express, apart from settings without a row."""
        return ()

    def _refuse(self, recipe: Recipe, plan: Plan, table: Mapping[str, Row]) -> None:
        """Raise RecipeError with what it cannot express of what the run learns."""
        keys = [row.ours if isinstance(row, TargetKey) else row for row in table.values()]
        known = {key.partition("[")[0] for key in keys if isinstance(key, str)}
        known |= {*_BESIDES.split()}
        chosen = [row for row in table.values() if isinstance(row, Chosen)]
        limits = {
            **{row.ours: [*dict.fromkeys(row.words.values())] for row in chosen},
            **self.limits,
        }
        problems = [*self.problems(recipe, plan)]
        here = f"in {self.tool}, "
        if plan.layout.vpp > 1 and not self.interleaves:
            chunks = str(plan.layout.vpp)
            problems.append(Problem("parallel.virtual_pipeline", chunks, f"{here}1"))
        for name in ("stages", "shares"):
            if uneven := getattr(plan.layout, name):
                problems.append(Problem(f"parallel.{name}", shown(uneven), f"{here}even ones"))
        if recipe.total_steps() is None:
            epochs = f"{recipe.training.epochs:g}"
            problems.append(Problem("training.epochs", epochs, f"{here}a number of steps"))
        for key, value in recipe.follows_validation.items():
            if key not in limits:
                fix = f"remove {key}, or train it with `dmt launch`"
                problems.append(Problem(key, value, f"{here}no such setting", fix))
        for key, value in leaves(recipe.model_dump(exclude={"model": {"config"}})):
            setting = recipe_settings().get(key)
            default = setting.info.get_default() if setting else value
            allowed = "no such setting" if default is None else shown(default)
            if key in limits:
                is_right, allowed = value in limits[key], " or ".join(map(str, limits[key]))
            elif setting is None or setting.info.is_required():
                continue
            else:
                has_row = any(key == name or key.startswith(f"{name}.") for name in known)
                is_right = has_row or value in (None, (), default)
            if not is_right:
                fix = f"change {key}, or train it with `dmt launch`"
                problems.append(Problem(key, shown(value), here + allowed, fix))
        if problems:
            raise RecipeError(problems)


def written_rows(
    table: Mapping[str, Row], recipe: Recipe, plan: Plan
) -> Iterator[tuple[str, object]]:
    """Every row of a table that the run has a value for, in the tool's words."""
    values = values_of(recipe, plan)
    for name, row in table.items():
        key = TargetKey(row) if isinstance(row, str) and row else row
        if not isinstance(key, TargetKey | Implied | Chosen) or key.write is None:
            continue
        if key.ours in values and (value := key.write(values[key.ours])) is not None:
            yield name, value
