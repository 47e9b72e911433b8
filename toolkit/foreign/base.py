"""A foreign format: a file of another tool that DMT reads.

Its table maps their names to the recipe's. Everything that reads goes through it: a reader
makes a `ForeignSetting` of each thing that stands in the file, and `read_settings` looks it up.
Of the `Stated`s that come out, `compare.py` judges whether they agree with a recipe
(`dmt check --against`), and `starter/from_files.py` makes one (`dmt init --from`). What has no
counterpart is a `Leftover` with the reason.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.intake.foreign import FOREIGN_VALUES, foreign
from toolkit.recipe.schema import Recipe
from toolkit.recipe.yaml_nodes import NumberError, Value, resolve_plain
from toolkit.text.suggest import did_you_mean

AUTO = "auto"
"""A value that is filled later: it takes the recipe's."""

WORLD = "world_size"
ACCUMULATION = "gradient_accumulation"
DATA_PARALLEL = "data_parallel"
SHARDS = "shards"
REPLICAS = "replicas"
COMPILED = "compiled"
"""Keys of what no recipe states, because it is derived, or always so."""


@dataclass(frozen=True)
class OneOf:
    """A statement that several values of the recipe fulfil, e.g. `fp16: false`."""

    values: tuple[object, ...]


@dataclass(frozen=True)
class AtMost:
    """A number that the recipe's may not exceed, e.g. of the available GPUs."""

    limit: int


@dataclass(frozen=True)
class PerReplica:
    """A number of sequences per data-parallel replica and optimizer step."""

    sequences: int


@dataclass(frozen=True)
class OverContext:
    """A number of sequences per optimizer step, which may count context-parallel ranks as
    data-parallel ones: DeepSpeed's does."""

    sequences: int


@dataclass(frozen=True)
class ShareOfSteps:
    """A number of steps, as a share of those of the run."""

    share: float


@dataclass(frozen=True)
class Nearest:
    """A statement that no recipe fulfils, and what comes nearest, which `dmt init` takes."""

    value: object
    difference: str
    """What the run then does differently, for a comment."""


@dataclass(frozen=True)
class NotCarried:
    """A row of a setting that no recipe has; also among the results of a `Rule`."""

    reason: str
    """Why, and what does the same here if anything does: without the setting's name."""
    key: str = ""
    """The recipe's setting whose value it is, where that value has no counterpart."""


CHANGES = "changes training: "
"""Begins the reason of a setting without which the run learns something else."""


def changes(what: str) -> NotCarried:
    """A setting without a counterpart that changes what the run learns."""
    return NotCarried(f"{CHANGES}{what}")


@dataclass(frozen=True)
class ForeignSetting:
    """One setting as it stands in a file or in the environment."""

    name: str
    """What it is called there."""
    value: Any
    place: str
    """`FILE:LINE`, or the variable's name."""
    text: str | None = None
    """How it is written there, where that is not the value."""

    @property
    def written(self) -> str:
        """Its value as it is written there."""
        return shown(self.value) if self.text is None else self.text


Settings = Mapping[str, ForeignSetting]
"""The settings of one file by the names of its table."""


@dataclass(frozen=True)
class Stated:
    """What a setting says of one of the recipe's."""

    key: str
    """The corresponding setting of the recipe, dotted."""
    value: object
    """Its value in the recipe's words; `AUTO` or one of the classes above."""
    at: ForeignSetting
    winner: str = ""
    """Which takes precedence if the two disagree, if not `SettingSource.winner`."""
    advice: str = ""
    """Special advice, if any."""
    breaks: bool = False
    """Whether a run that starts all the same would fail or train something else."""
    certain: bool = True
    """False: whether it agrees shows only in the run; `advice` says when."""


@dataclass(frozen=True)
class Leftover:
    """A setting of the other place that no recipe has."""

    at: ForeignSetting
    reason: str
    key: str = ""
    """See `NotCarried`."""


@dataclass(frozen=True)
class Unknown:
    """A value that the tool does not take."""

    name: str
    place: str
    hint: str = ""
    """What is wrong."""


@dataclass(frozen=True)
class Misspelt(Unknown):
    """A name that the tool does not know; `hint`, such as: did you mean `train_batch_size`?"""


@dataclass(frozen=True)
class TargetKey:
    """A row of a format's table: one of the recipe's settings, and how values are converted."""

    ours: str
    read: Callable[[Any], object] = lambda value: value
    """Their value in the recipe's words."""
    write: Callable[[Any], object] | None = lambda value: value
    """The recipe's value in theirs; None where DMT does not write it."""


Result = Stated | Unknown | NotCarried
Rule = Callable[[ForeignSetting, Settings], Iterable[Result] | None]
"""A row whose meaning depends on others. None: nothing that a recipe has. Empty: it is part of
what another row states."""
Row = str | TargetKey | Rule | NotCarried
"""Of a table; a string is a setting of the recipe with the same values."""

NO_EFFECT = NotCarried("has no effect with this value")

NO_SETTING = "a recipe has no such setting"
"""Why what has no row is not carried, unless `intake/foreign.py` knows better."""


@dataclass
class SettingSource:
    """One place that states settings."""

    name: str = ""
    """As the user calls it: a path, or `env`."""
    kind: str = ""
    """What it is, in words."""
    who: tuple[str, ...] = ()
    """One sentence for each tool that would read it, about precedence there."""
    winner: str = "recipe"
    """Which takes precedence under DMT where it disagrees with the recipe."""
    stated: list[Stated] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    """Settings without a counterpart in a recipe."""
    unknown: list[Unknown] = field(default_factory=list)

    def add(self, other: "SettingSource") -> None:
        """Take over the settings of `other`."""
        self.stated += other.stated
        self.leftovers += other.leftovers
        self.unknown += other.unknown

    @property
    def only_there(self) -> list[str]:
        """Names of the settings without a counterpart."""
        return [leftover.at.name for leftover in self.leftovers]


class Target:
    """A foreign format. Without torch, as everything that `dmt check` imports."""

    kind: ClassVar[str]
    """What its files are, in words."""
    form: ClassVar[str]
    """The same with an article and the notation, for the list of what can be read."""
    tool: ClassVar[str] = ""
    """Whose files they are: `Axolotl`; empty: `kind` says it."""
    defaults: ClassVar[Mapping[str, object]] = {}
    """What the tool does where its file is silent, by our keys, as `Stated` values: where the
    recipe's default differs, or the recipe requires a value. `dmt init --from` states them."""
    must_be: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Values without which a file is for another objective or method, which is refused."""
    who: ClassVar[tuple[str, ...]]
    """See `SettingSource`."""
    names: ClassVar[frozenset[str]] = frozenset()
    """Top-level names by which a JSON or YAML file is recognised."""
    knows_all: ClassVar[bool] = True
    """Whether its tables have every name of the tool."""

    def score(self, values: Mapping[str, Any]) -> int:
        """How much a JSON or YAML file looks like one of these."""
        return len(self.names & values.keys())

    def parse(self, text: str, path: Path) -> JsonFile | None:
        """The settings in a text that is neither JSON nor YAML; None where it has none."""
        return None

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """What a file states. `recipe` may name this very file; None for `dmt init --from`."""
        raise NotImplementedError


_MODULES = (
    "toolkit.foreign.deepspeed",
    "toolkit.foreign.accelerate",
    "toolkit.foreign.trainer_file",
    "toolkit.foreign.megatron_lm",
    "toolkit.foreign.llama_factory",
    "toolkit.foreign.axolotl",
)


@cache
def targets() -> tuple[Target, ...]:
    """Every format that is read."""
    return tuple(import_module(module).TARGET for module in _MODULES)


def read_settings(
    settings: Settings,
    keys: Mapping[str, Row],
    other: Callable[[ForeignSetting], Unknown | NotCarried | None] = lambda _: None,
    names: Iterable[str] | None = None,
) -> SettingSource:
    """What `settings` state, by a table.

    `other` judges a name without a row: None where it is right, but no recipe has it and it has
    no reason of its own. `names` are those that are read, if not all.
    """
    found = SettingSource()
    for theirs in settings if names is None else names:
        setting, row = settings[theirs], keys.get(theirs, "")
        for result in _results(setting, row, settings, other):
            if isinstance(result, Stated):
                found.stated.append(result)
            elif isinstance(result, Unknown):
                found.unknown.append(result)
            else:
                found.leftovers.append(Leftover(setting, result.reason, result.key))
    return found


def _results(
    setting: ForeignSetting,
    row: Row,
    settings: Settings,
    other: Callable[[ForeignSetting], Unknown | NotCarried | None],
) -> Iterable[Result]:
    """What one setting states by its row."""
    if isinstance(row, NotCarried):
        return (row,)
    if not row:
        wrong = other(setting)
        return (wrong or not_carried(setting.name),)
    if isinstance(row, str | TargetKey):
        key = TargetKey(row) if isinstance(row, str) else row
        return (Stated(key.ours, key.read(setting.value), setting),)
    results = row(setting, settings)
    return (not_carried(setting.name),) if results is None else results


def not_carried(name: str) -> NotCarried:
    """Why a setting without a row has no counterpart."""
    known = foreign(name.rpartition(".")[2])
    return NotCarried(known.note if known and known.target is None else NO_SETTING)


def written(keys: Mapping[str, Row], values: Mapping[str, object]) -> dict[str, object]:
    """What the file of a run states: a table's rows with the run's values (`facts.py`)."""
    rows = {name: TargetKey(row) if isinstance(row, str) else row for name, row in keys.items()}
    return {
        name: row.write(values[row.ours])
        for name, row in rows.items()
        if isinstance(row, TargetKey) and row.write is not None
    }


def unknown(setting: ForeignSetting, known: Iterable[str]) -> Misspelt:
    """An unknown name, with what may have been meant."""
    bare = setting.name.rpartition(".")[2]
    other = foreign(bare)
    advice = f"in a recipe: {other.advice}" if other else ""
    return Misspelt(setting.name, setting.place, did_you_mean(bare, known, advice, cutoff=0.8))


def translated(key: str) -> Callable[[object], object]:
    """A `TargetKey.read` that turns another tool's word for the setting `key` into ours."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        return FOREIGN_VALUES.get(key, {}).get(value.lower(), value.lower())

    return read


def precisions(switches: Settings) -> list[Stated]:
    """What the switches bf16 and fp16 imply for the recipe's `training.precision`.

    A switch that is off excludes its own precision; both off mean fp32.
    """
    off = [name for name, setting in switches.items() if setting.value is False]
    stated = []
    for name, setting in switches.items():
        meaning: object = setting.value
        if meaning is True:
            meaning = name
        elif meaning is False:
            others = tuple(other for other in ("fp32", "bf16", "fp16") if other != name)
            meaning = "fp32" if len(off) == 2 else OneOf(others)
        stated.append(Stated("training.precision", meaning, setting))
    return stated


def global_batch(stated: Iterable[Stated]) -> list[Stated]:
    """The global batch that a micro batch and its accumulation come to."""
    numbers = {
        row.key: row
        for row in stated
        if type(number(row.value)) is int or isinstance(row.value, OverContext)
    }
    micro, steps = numbers.get("training.micro_batch_size"), numbers.get(ACCUMULATION)
    if micro is None or steps is None or "training.global_batch_size" in numbers:
        return []
    assert isinstance(micro.value, int) and isinstance(steps.value, int)
    batch = PerReplica(micro.value * steps.value)
    name = f"{micro.at.name} · {steps.at.name} · dp"
    text = f"{micro.at.written} · {steps.at.written} · dp"
    at = ForeignSetting(name, batch, micro.at.place, text)
    return [Stated("training.global_batch_size", batch, at)]


def number(value: object) -> float | None:
    """A finite number of usual size; None for anything else, `true` included."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) < sys.float_info.max else None


def device(value: object) -> object:
    """`none` where nothing is offloaded, however that is written."""
    return "none" if value in (None, "none", "None") else value


def none_if_zero(value: object) -> object:
    """A recipe's null for a number that switches something off."""
    return None if value == 0 else value


CLIPPING = TargetKey("optimizer.clip_grad_norm", none_if_zero, lambda norm: norm or 0.0)
"""A row of the largest norm of a gradient, where 0 is none."""


def shown(value: object) -> str:
    """A value as JSON and YAML write it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(item) for item in value)}]"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def as_yaml(text: str) -> Value:
    """A plain value as YAML reads it, `True` and `true` alike; a number without end as text."""
    try:
        return resolve_plain(text)
    except NumberError:
        return text


def relative_to_file(name: str, path: Path) -> Path:
    """A file that another one names: from the working directory, as the tools take it, else
    from that file's own folder."""
    near = path.parent / name
    with suppress(OSError, ValueError):  # no name that a file can have
        if not Path(name).exists() and near.exists():
            return near
    return Path(name)
