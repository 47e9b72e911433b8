"""`dmt init --from`: what files of other tools state, as the values of a recipe.

`Statements` gathers them: each `Stated` of a `Target` becomes a value with its origin, or
a line of what is not carried. `imported.py` makes the recipe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed.config import same
from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.foreign.base import (
    ACCUMULATION,
    AUTO,
    CHANGES,
    COMPILED,
    REPLICAS,
    WORLD,
    AtMost,
    ForeignSetting,
    Misspelt,
    Nearest,
    OneOf,
    OverContext,
    PerReplica,
    SettingSource,
    ShareOfSteps,
    Stated,
    Target,
    global_batch,
    shown,
)
from toolkit.foreign.facts import DERIVED
from toolkit.foreign.files import recognised
from toolkit.recipe.schema import LENGTH_SETTINGS
from toolkit.starter.shape import config_of_shape
from toolkit.text.redact import redact
from toolkit.text.terminal import printable
from toolkit.text.units import shortened

PAGE = "docs/coming-from/"
"""What to read for scripts, which are not parsed."""
_BATCH, _MICRO = "training.global_batch_size", "training.micro_batch_size"
_BETAS = "optimizer.betas"
_LONGEST = 60
"""Characters of a value that a comment quotes."""


@dataclass(frozen=True)
class Uncarried:
    """A setting of a file that the recipe does not have."""

    name: str
    written: str
    place: str
    reason: str
    is_ignored: bool = False
    """Whether nothing that is learned depends on it."""

    def __str__(self) -> str:
        value = f" {self.written}" if self.written else ""
        return f"{self.name}{value} ({self.place}): {self.reason}"


@dataclass
class Statements:
    """What all files state, by the recipe's keys."""

    targets: tuple[Target, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """The comment of each value: `FILE:LINE NAME`, or whose default it is."""
    uncarried: list[Uncarried] = field(default_factory=list)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What the tools do where the files are silent."""
    world: int | None = None
    """Ranks, where the files state them."""

    def drop(self, at: ForeignSetting, reason: str, ignored: bool = False) -> None:
        """A setting that is not carried."""
        written = "" if at.value is None and at.text is None else _short(at.written)
        self.uncarried.append(Uncarried(at.name, written, at.place, reason, ignored))

    def put(self, key: str, value: object, origin: str) -> None:
        """A value, unless one is there."""
        if key not in self.values:
            self.values[key], self.origins[key] = value, printable(origin)


def _short(text: str) -> str:
    return shortened(printable(redact(text)), _LONGEST)


def read_files(paths: Sequence[Path], world: int | None, has_model: bool = False) -> Statements:
    """What `paths` state together, on `world` ranks if the files do not say. `has_model`: the
    user names the model, whose shape the files do not decide.

    Raises RecipeError for a file that cannot be read, and where two files contradict each
    other; PlanError for a script.
    """
    found = Statements()
    stated: list[Stated] = []
    for path in paths:
        if path.suffix == ".py":
            raise PlanError(
                f"--from: {path} is a script, and dmt runs and reads no foreign code",
                fix=f"{PAGE} has a page for each tool: what of your script a recipe states",
            )
        target, file = recognised(path, "--from")
        source = target.read(file, None)
        _refuse_others(target, file, source)
        found.targets += (target,)
        stated += source.stated
        for leftover in source.leftovers:
            ignored = not leftover.reason.startswith(CHANGES)
            found.drop(leftover.at, leftover.reason, ignored)
        for name in source.unknown:
            reason = name.hint
            if isinstance(name, Misspelt):
                tool = target.tool or target.kind
                said = f"not in DMT's table of {tool}'s settings: it may change training"
                said = f"{tool} does not know it" if target.knows_all else said
                reason = "; ".join(filter(None, (said, name.hint)))
            found.uncarried.append(Uncarried(name.name, "", name.place, reason))
    chosen, choices = _chosen(found, stated)
    _add_plain(found, chosen)
    defaults = _defaults(found.targets)
    _add_batch(found, chosen, stated, defaults, world)
    found.defaults = defaults
    _add_defaults(found, defaults)
    _add_choices(found, choices)
    if not has_model:
        _add_shape(found, chosen)
    for one in stated:
        if one.value == AUTO and one.key not in found.values and one.key not in chosen:
            found.drop(one.at, f"no file states {one.key}: the recipe's value or the plan's")
    return found


def _refuse_others(target: Target, file: JsonFile, source: SettingSource) -> None:
    """Raise RecipeError for another objective, and for values that are not understood and for
    which the tool's default, or DMT's, would be trained instead."""
    problems = [
        _problem_at(file.place(name), name, value, " or ".join(map(shown, words)), _OTHER_RUN)
        for name, words in target.must_be.items()
        if (value := file.values.get(name)) not in words
    ]
    problems += [
        _problem_at(one.place, one.name, one.hint, "a value that DMT can read", _LEAVE_OUT)
        for one in source.unknown
        if not isinstance(one, Misspelt)
    ]
    problems += [
        _problem_at(
            one.at.place, one.at.name, one.at.value,
            one.reason.removeprefix(CHANGES), f"{_LEAVE_OUT} ({one.key})",
        )
        for one in source.leftovers
        if one.key in {*target.defaults, "optimizer.name", "schedule.name"}
        and one.reason.startswith(CHANGES)
    ]  # fmt: skip
    if problems:
        raise RecipeError(problems)


_OTHER_RUN = "DMT trains this objective and method only: use the tool for this file"
_LEAVE_OUT = "remove it from the file, and write it in the recipe"


def _problem_at(place: str, name: str, value: object, allowed: str, fix: str) -> Problem:
    file, _, line = place.rpartition(":")
    number = int(line) if line.isdecimal() else 0
    return Problem(name, _short(shown(value)), allowed, fix, file or place, number)


def _defaults(targets: Sequence[Target]) -> dict[str, Any]:
    """Those of all tools; of the first where two differ. Betas may be given one by one."""
    stated: dict[str, Any] = {}
    for target in reversed(targets):
        stated |= target.defaults
    betas = [stated.pop(f"{_BETAS}[{index}]", None) for index in (0, 1)]
    if None not in betas:
        stated[_BETAS] = betas
    return stated


def _chosen(
    found: Statements, stated: Sequence[Stated]
) -> tuple[dict[str, Stated], dict[str, list[Stated]]]:
    """One statement per key, and those that several values fulfil.

    Raises RecipeError where two files contradict each other.
    """
    chosen: dict[str, Stated] = {}
    choices: dict[str, list[Stated]] = {}
    problems = []
    for one in stated:
        if "$" in one.at.written and not one.certain:
            found.drop(one.at, one.advice)
        elif one.value == AUTO:
            continue  # it takes what the other file states
        elif isinstance(one.value, OneOf | AtMost):
            choices.setdefault(one.key, []).append(one)
        elif (first := chosen.setdefault(one.key, one)) is not one:
            if same(_plain(first.value), _plain(one.value)):
                continue
            if _file(first) != _file(one):
                problems.append(_contradiction(first, one))
            else:
                found.drop(one.at, f"{first.at.name} at {first.at.place} decides {one.key}")
    for key, several in choices.items():
        for one in several:
            if key in chosen and not _fulfils(chosen[key].value, one.value):
                problems.append(_contradiction(chosen[key], one))
    if problems:
        raise RecipeError(problems)
    return chosen, {key: several for key, several in choices.items() if key not in chosen}


def _contradiction(first: Stated, second: Stated) -> Problem:
    """Of two files, or of two settings."""
    place, _, line = second.at.place.rpartition(":")
    return Problem(
        second.key,
        _short(f"{second.at.name}: {second.at.written}"),
        f"what {first.at.name} at {first.at.place} says: {_short(first.at.written)}",
        "make both say the same",
        place or second.at.place,
        int(line) if line.isdecimal() else 0,
    )


def _file(one: Stated) -> str:
    return one.at.place.rpartition(":")[0]


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _fulfils(value: object, several: object) -> bool:
    if isinstance(value, Nearest):
        value = value.value
    return not isinstance(several, OneOf) or any(same(one, value) for one in several.values)


def _add_plain(found: Statements, chosen: Mapping[str, Stated]) -> None:
    """The values that are a recipe's."""
    for key, one in chosen.items():
        origin = f"{one.at.place} {one.at.name}"
        value = one.value
        if isinstance(value, Nearest):
            origin, value = f"{origin}: {value.difference}", value.value
        if isinstance(value, ShareOfSteps):
            found.put("schedule.warmup_ratio", value.share, origin)
        elif key == REPLICAS:
            found.put("parallel.replicate", value, origin)
        elif key == COMPILED:
            found.drop(one.at, "kernels.compile: auto compiles layers where it is faster")
        elif key.partition(".")[2] in _fixed(key):
            if not same(value, _fixed(key)[key.partition(".")[2]]):
                found.drop(one.at, "any other value than DMT's changes or corrupts the loss")
        elif isinstance(value, PerReplica | OverContext) or key in DERIVED or "[" in key:
            continue
        elif not key.startswith("megatron."):
            if not one.certain and one.advice and key.startswith("data."):
                origin = f"{origin}: {one.advice}"
            found.put(key, value, origin)
    betas = [chosen.get(f"{_BETAS}[{index}]") for index in (0, 1)]
    if any(betas):
        usual = _defaults(found.targets).get(_BETAS, (0.9, 0.999))  # torch's
        pair = [one.value if one else usual[index] for index, one in enumerate(betas)]
        found.put(_BETAS, pair, _places(*(one for one in betas if one)))
    for key in ("logging.wandb", "logging.mlflow", "logging.trackio"):
        if isinstance(on := found.values.get(key), bool):
            origin = found.origins.pop(key)
            del found.values[key]
            if on and not any(name.startswith(f"{key}.") for name in found.values):
                found.put(key, {}, origin)


def _fixed(key: str) -> Mapping[str, object]:
    engine = key.partition(".")[0]
    return BACKENDS[engine].fixed if engine in BACKENDS.names else {}


def _places(*several: Stated) -> str:
    return ", ".join(f"{one.at.place} {one.at.name}" for one in several)


def _add_batch(
    found: Statements,
    chosen: Mapping[str, Stated],
    stated: Sequence[Stated],
    defaults: dict[str, Any],
    world: int | None,
) -> None:
    """The global batch: as stated, or micro batch · accumulation · data-parallel ranks."""
    nodes, per_node = (found.values.get(f"cluster.{key}") for key in ("nodes", "gpus_per_node"))
    if (one := chosen.get(WORLD)) and isinstance(one.value, int):
        found.world = one.value
    elif isinstance(per_node, int):
        found.world = per_node * int(nodes or 1)
    values = {**defaults, **found.values}
    context = int(values.get("parallel.context", 1))
    model = context * int(values.get("parallel.tensor", 1))
    model *= int(values.get("parallel.pipeline", 1))
    ranks = found.world or world
    dp = max(1, ranks // model) if ranks else None
    one = chosen.get(_BATCH) or next(iter(global_batch(stated)), None)
    if one is not None:
        batch = one.value
        if isinstance(batch, OverContext):
            batch = batch.sequences // context
        if isinstance(batch, PerReplica):
            batch = batch.sequences * dp if dp else None
        if batch is not None:
            ranks_text = f" with dp {dp}" if isinstance(one.value, PerReplica) else ""
            found.put(_BATCH, batch, f"{one.at.place} {one.at.name}{ranks_text}")
    accumulation = chosen.get(ACCUMULATION)
    steps = accumulation.value if accumulation else defaults.pop(ACCUMULATION, 1)
    micro = values.get(_MICRO)
    if isinstance(micro, int) and isinstance(steps, int) and dp and _BATCH not in defaults:
        found.put(_BATCH, micro * steps * dp, f"{_MICRO} {micro} · {steps} · dp {dp}")
    batch = found.values.get(_BATCH)
    if accumulation and not (
        isinstance(batch, int) and isinstance(micro, int) and dp
        and batch == micro * dp * int(str(steps))
    ):  # fmt: skip
        found.drop(accumulation.at, f"it is {DERIVED[ACCUMULATION]}")
    defaults.pop(ACCUMULATION, None)


def _add_defaults(found: Statements, defaults: Mapping[str, Any]) -> None:
    """What the tools do where the files are silent."""
    tool = next((one.tool for one in found.targets if one.defaults and one.tool), "the tool")
    lengths = {*LENGTH_SETTINGS} & found.values.keys()
    warmup = {"schedule.warmup_steps", "schedule.warmup_ratio"} & found.values.keys()
    for key, value in defaults.items():
        if isinstance(value, ShareOfSteps):
            key, value = "schedule.warmup_ratio", value.share
        taken = (
            (key in LENGTH_SETTINGS and lengths)
            or (key.startswith("schedule.warm") and warmup)
            or (key == "model.init" and "model.hub" not in found.values)
        )
        if not taken and not isinstance(value, PerReplica):
            found.put(key, value, f"{tool}'s default")


def _add_choices(found: Statements, choices: Mapping[str, Sequence[Stated]]) -> None:
    """Where several values fulfil all statements: the default if it is one, else the first."""
    for key, several in choices.items():
        first = several[0]
        if not isinstance(first.value, OneOf) or key in DERIVED:
            continue
        if key in found.values:
            if not all(_fulfils(found.values[key], one.value) for one in several):
                del found.values[key]
            else:
                continue
        values = [v for v in first.value.values
                  if all(_fulfils(v, one.value) for one in several)]  # fmt: skip
        if values:
            found.put(key, values[0], _places(*several))
        else:
            found.drop(first.at, f"no value of {key} fulfils what the file says of it")


def _add_shape(found: Statements, chosen: Mapping[str, Stated]) -> None:
    """The model that megatron-core's settings describe, if no other is stated."""
    shape = {key.partition(".")[2]: one for key, one in chosen.items()
             if key.startswith("megatron.")}  # fmt: skip
    if not shape:
        return
    config, different = config_of_shape({name: one.value for name, one in shape.items()})
    for name in ("attention_dropout", "hidden_dropout"):
        if name in different and name in shape:
            found.drop(shape[name].at, f"{CHANGES}the model has {shown(different.pop(name))}")
    if other := [(one, different[name]) for name, one in shape.items() if name in different]:
        raise RecipeError([
            _problem_at(
                one.at.place, one.at.name, one.value,
                f"{shown(theirs)}, as in {config['model_type']}, the closest model",
                "name the model, which is then taken instead: dmt init MODEL --from FILE",
            )
            for one, theirs in other
        ])  # fmt: skip
    first = next(iter(shape.values()))
    for key, value in config.items():
        at = f"{first.at.place} and the other settings of the model"
        found.put(f"model.config.{key}", value, at)
