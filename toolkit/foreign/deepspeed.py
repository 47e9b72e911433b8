"""A DeepSpeed `ds_config.json`. The engine's own renderer writes it (engines/deepspeed)."""

from collections.abc import Mapping
from typing import Any

from toolkit.engines.deepspeed.config import (
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAMETERS,
    OWNED,
    REQUIRED,
    ZERO,
    open_config,
    unknown_keys,
)
from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.engines.deepspeed.keys import KNOWN_KEYS, REMOVED
from toolkit.errors import Problem
from toolkit.foreign.base import (
    ACCUMULATION,
    AUTO,
    NO_EFFECT,
    ForeignSetting,
    Misspelt,
    NotCarried,
    OverContext,
    Row,
    SettingSource,
    Target,
    TargetKey,
    Unknown,
    device,
    global_batch,
    none_if_zero,
    precisions,
    read_settings,
    translated,
)
from toolkit.foreign.options import read_options
from toolkit.recipe.schema import Recipe
from toolkit.text.dotted import leaves

_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def _schedule(value: object) -> object:
    return translated("schedule.name")(_SCHEDULERS.get(str(value), value))


def _batch(value: object) -> object:
    return OverContext(value) if isinstance(value, int) else value


def _offload(value: object) -> object:
    return value if value == AUTO else ("cpu" if value else "none")


_OPTIONS = read_options("deepspeed", __file__)
_NOT_WRITTEN: Mapping[str, Row] = {
    "scheduler.type": TargetKey("schedule.name", _schedule),
    f"{ZERO}.cpu_offload": TargetKey("parallel.zero.offload_optimizer", _offload),
    f"{ZERO}.cpu_offload_param": TargetKey("parallel.zero.offload_parameters", _offload),
    "scheduler.params.warmup_min_lr": "",
    f"{ZERO}.cpu_offload_use_pin_memory": "",
    **{name: row for name, row in _OPTIONS.rows.items() if isinstance(row, TargetKey)},
}
"""Settings that DMT does not write, and what a recipe calls them, if it does."""

KEYS: Mapping[str, Row] = {
    **OWNED,
    **{key: f"deepspeed.{key}" for key in REQUIRED},
    **_NOT_WRITTEN,
    "train_batch_size": TargetKey(OWNED["train_batch_size"], _batch),
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": TargetKey(OWNED["gradient_clipping"], none_if_zero),
    "optimizer.type": TargetKey(OWNED["optimizer.type"], lambda value: str(value).lower()),
    **{
        key: TargetKey(OWNED[key], device)
        for key in (f"{OFFLOAD_OPTIMIZER}.device", f"{OFFLOAD_PARAMETERS}.device")
    },
}

_DROPPING = frozenset(("", "aio", "data_types", "optimizer"))
"""Blocks whose unknown keys DeepSpeed drops; the others are pydantic models that forbid them,
or, as `optimizer.params`, arguments of a class."""

_PRECISIONS = {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}


class DeepSpeedTarget(Target):
    """The one format in which a value may be "auto"."""

    kind = "DeepSpeed config"
    form = "a DeepSpeed config (JSON)"
    tool = "DeepSpeed"
    names = KNOWN_KEYS[""]
    who = (
        "DMT does not read this file (parallel.zero.config would name it): the recipe takes "
        "precedence",
        "HF Trainer refuses batch, accumulation, clipping, optimizer, warm-up and precision "
        "that disagree with its TrainingArguments; for the rest this file takes precedence",
    )

    def score(self, values: Mapping[str, Any]) -> int:
        """A setting that two formats have (`fp16`) is a block for DeepSpeed only."""
        blocks = ("fp16", "bf16", "optimizer")
        return super().score(values) + sum(isinstance(values.get(key), dict) for key in blocks)

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """See `Target`; `recipe` says whether DMT reads this very file."""
        found = collect(file)
        found.name, found.kind, found.who = str(file.path), self.kind, self.who
        named = None if recipe is None else recipe.parallel.zero.config
        if named is not None and open_config(named).path.resolve() == file.path.resolve():
            found.winner = "refused"
            found.who = (
                'parallel.zero.config names this file: DMT fills each "auto" and refuses a '
                "value that disagrees, so nothing starts",
            )
        return found


TARGET = DeepSpeedTarget()


def collect(file: JsonFile, prefix: str = "") -> SettingSource:
    """Every setting of `file`; `prefix` is put before names, for a config inside another."""
    misspelt = {p.key: p for p in unknown_keys(file) if p.key not in _NOT_WRITTEN}
    settings = {
        key: ForeignSetting(prefix + key, value, file.place(key))
        for key, value in leaves(file.values)
        if not any(key == wrong or key.startswith(f"{wrong}.") for wrong in misspelt)
    }
    in_order = [key for key in settings if key in _PRECISIONS]
    switches = {_PRECISIONS[key]: settings.pop(key) for key in in_order}
    found = read_settings(
        settings, KEYS, lambda one: _reason(one.name.removeprefix(prefix), one)
    )
    for key, problem in misspelt.items():
        kind = Unknown if key in KNOWN_KEYS else Misspelt
        found.unknown.append(kind(prefix + key, file.place(key), _hint(problem)))
    found.stated += global_batch(found.stated)
    found.stated += precisions(switches)
    return found


def _reason(name: str, setting: ForeignSetting) -> NotCarried | None:
    """Why a setting without a row is not carried: by its name, or by the block it is in."""
    why = _OPTIONS.rows.get(name) or _OPTIONS.rows.get(name.partition(".")[0])
    if isinstance(why, NotCarried):
        return why
    if not callable(why):
        return None
    results = [NO_EFFECT] if setting.value == AUTO else why(setting, {}) or ()
    return next((one for one in results if isinstance(one, NotCarried)), None)


def _hint(problem: Problem) -> str:
    """What was meant, or what DeepSpeed makes of an unknown key."""
    if problem.key in KNOWN_KEYS:
        return f"not {problem.allowed}"
    if problem.fix.startswith("did you"):
        return problem.fix
    if problem.fix.endswith(REMOVED):
        return REMOVED
    dropped = problem.key.rpartition(".")[0] in _DROPPING
    return "DeepSpeed drops it silently" if dropped else "DeepSpeed refuses it"
