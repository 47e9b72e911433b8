"""The settings of a file or the environment, in the recipe's terms."""

import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from toolkit.recipe.foreign import FOREIGN_VALUES, foreign
from toolkit.recipe.yaml_nodes import NumberError, Value, resolve_plain
from toolkit.suggest import did_you_mean

AUTO = "auto"
"""A value that is filled later: it takes the recipe's."""

WORLD = "world_size"
ACCUMULATION = "gradient_accumulation"
DATA_PARALLEL = "data_parallel"
SHARDS = "shards"
REPLICAS = "replicas"
CONTEXT_PARALLEL = "context_parallel"
COMPILED = "compiled"
ACTIVATIONS_OFFLOADED = "activations_offloaded"
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
class Stated:
    """One setting of the other place."""

    key: str
    """The corresponding setting of the recipe, dotted."""
    value: object
    """Its value in the recipe's words; `AUTO`, `OneOf`, `AtMost`, or `PerReplica`."""
    name: str
    """What it is called there."""
    shown: str
    """Its value as it is written there."""
    place: str
    """`FILE:LINE`, or the variable's name."""
    winner: str = ""
    """Which takes precedence if the two disagree, if not `SettingSource.winner`."""
    advice: str = ""
    """Special advice, if any."""
    breaks: bool = False
    """Whether a run that starts all the same would fail or train something else."""
    certain: bool = True
    """False: whether it agrees shows only in the run; `advice` says when."""


@dataclass(frozen=True)
class Unknown:
    """A name that the tool does not know."""

    name: str
    place: str
    hint: str = ""
    """Such as: did you mean `train_batch_size`?"""


@dataclass(frozen=True)
class SettingSource:
    """One place that states settings."""

    name: str
    """As the user calls it: a path, or `env`."""
    kind: str
    """What it is, in words."""
    winner: str
    """Which takes precedence under DMT where it disagrees with the recipe."""
    who: tuple[str, ...]
    """One sentence for each tool that would read it, about precedence there."""
    stated: tuple[Stated, ...]
    only_there: tuple[str, ...] = ()
    """Settings without a counterpart in a recipe."""
    unknown: tuple[Unknown, ...] = ()


@dataclass
class Collected:
    """Collects a reader's results."""

    stated: list[Stated] = field(default_factory=list)
    only_there: list[str] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)

    def add(self, other: "Collected") -> None:
        """Take over everything of `other`."""
        self.stated += other.stated
        self.only_there += other.only_there
        self.unknown += other.unknown

    def source(self, name: str, kind: str, winner: str, *who: str) -> SettingSource:
        """The whole of it."""
        found = (tuple(self.stated), tuple(self.only_there), tuple(self.unknown))
        return SettingSource(name, kind, winner, who, *found)


def unknown(name: str, place: str, known: Iterable[str]) -> Unknown:
    """An unknown name, with what may have been meant."""
    bare = name.rpartition(".")[2]
    other = foreign(bare)
    advice = f"in a recipe: {other.advice}" if other else ""
    return Unknown(name, place, did_you_mean(bare, known, advice, cutoff=0.8))


def translated(key: str, value: object) -> object:
    """Another tool's value in the recipe's terms."""
    if not isinstance(value, str):
        return value
    return FOREIGN_VALUES.get(key, {}).get(value.lower(), value.lower())


def precisions(switches: Mapping[str, object]) -> dict[str, object]:
    """What the switches bf16 and fp16 imply for the recipe's `training.precision`.

    A switch that is off excludes its own precision; both off mean fp32.
    """
    every = ("fp32", "bf16", "fp16")
    both_off = all(switches.get(name) is False for name in ("bf16", "fp16"))
    meanings: dict[str, object] = {}
    for name, value in switches.items():
        if value is True:
            meanings[name] = name
        elif value is False:
            others = tuple(other for other in every if other != name)
            meanings[name] = "fp32" if both_off else OneOf(others)
        else:
            meanings[name] = value
    return meanings


def global_batch(stated: Iterable[Stated]) -> tuple[Stated, ...]:
    """The global batch that a micro batch and its accumulation come to."""
    found = {one.key: one for one in stated if type(number(one.value)) is int}
    micro, steps = found.get("training.micro_batch_size"), found.get(ACCUMULATION)
    if micro is None or steps is None or "training.global_batch_size" in found:
        return ()
    assert isinstance(micro.value, int) and isinstance(steps.value, int)
    batch = PerReplica(micro.value * steps.value)
    name, text = f"{micro.name} · {steps.name} · dp", f"{micro.shown} · {steps.shown} · dp"
    return (Stated("training.global_batch_size", batch, name, text, micro.place),)


def number(value: object) -> float | None:
    """A finite number of usual size; None for anything else, `true` included."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) < sys.float_info.max else None


def device(value: object) -> object:
    """`none` where nothing is offloaded, however that is written."""
    return "none" if value in (None, "none", "None") else value


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
