"""A DeepSpeed `ds_config.json`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.config import OWNED, REQUIRED, open_config, unknown_keys
from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.engines.deepspeed.keys import KNOWN_KEYS
from toolkit.errors import Problem
from toolkit.recipe.schema import Recipe
from toolkit.targets.source import (
    ACCUMULATION,
    AUTO,
    Collected,
    SettingSource,
    Stated,
    Unknown,
    device,
    global_batch,
    precisions,
    shown,
    translated,
)

KIND = "DeepSpeed config"

_ELSEWHERE: Mapping[str, str] = {
    "scheduler.params.warmup_num_steps": "schedule.warmup_steps",
    "scheduler.params.warmup_max_lr": "optimizer.learning_rate",
    "scheduler.params.warmup_min_lr": "",
    "scheduler.params.total_num_steps": "training.steps",
    "tensor_parallel.autotp_size": "parallel.tensor",
    "zero_optimization.cpu_offload": "parallel.zero.offload_optimizer",
    "zero_optimization.cpu_offload_param": "parallel.zero.offload_parameters",
    "zero_optimization.cpu_offload_use_pin_memory": "",
    "wandb.enabled": "logging.wandb",
    "wandb.project": "logging.wandb.project",
    "wandb.team": "logging.wandb.entity",
    "tensorboard.enabled": "logging.tensorboard",
}
"""Settings that DMT does not write, and what a recipe calls them, if it does."""

_DROPPING = frozenset(("", "aio", "data_types", "optimizer"))
"""Blocks whose unknown keys DeepSpeed drops; the others are pydantic models that forbid them,
or, as `optimizer.params`, arguments of a class."""

_SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_PRECISIONS = {"bf16.enabled": "bf16", "fp16.enabled": "fp16"}


def read(file: JsonFile, name: str, recipe: Recipe) -> SettingSource:
    """What a DeepSpeed config states; `recipe` says whether DMT reads this very file."""
    found = collect(file)
    if _is_named(file.path, recipe):
        return found.source(
            name,
            KIND,
            "refused",
            'parallel.zero.config names this file: DMT fills each "auto" and refuses a value '
            "that disagrees, so nothing starts",
        )
    return found.source(
        name,
        KIND,
        "recipe",
        "DMT does not read this file (parallel.zero.config would name it): the recipe takes "
        "precedence",
        "HF Trainer refuses batch, accumulation, clipping, optimizer, warm-up and precision "
        "that disagree with its TrainingArguments; for the rest this file takes precedence",
    )


def collect(file: JsonFile, prefix: str = "") -> Collected:
    """Every setting of `file`; `prefix` is put before names, for a config inside another."""
    found = Collected()
    misspelt = {p.key: p for p in unknown_keys(file) if p.key not in _ELSEWHERE}
    for key, problem in misspelt.items():
        found.unknown.append(Unknown(prefix + key, file.place(key), _hint(problem)))
    switches: dict[str, object] = {}
    for key, value in _leaves(file.values):
        if any(key == wrong or key.startswith(f"{wrong}.") for wrong in misspelt):
            continue
        if key in _PRECISIONS:
            switches[_PRECISIONS[key]] = value
            continue
        stated = _stated(key, value, prefix + key, file.place(key))
        if stated is None:
            found.only_there.append(prefix + key)
        else:
            found.stated.append(stated)
    found.stated += global_batch(found.stated)
    for name, meant in precisions(switches).items():
        key = f"{name}.enabled"
        at = (prefix + key, shown(switches[name]), file.place(key))
        found.stated.append(Stated("training.precision", meant, *at))
    return found


def _hint(problem: Problem) -> str:
    """What was meant, or what DeepSpeed makes of an unknown key."""
    if problem.key in KNOWN_KEYS:
        return f"not {problem.allowed}"
    if problem.fix.startswith("did you"):
        return problem.fix
    dropped = problem.key.rpartition(".")[0] in _DROPPING
    return "DeepSpeed drops it silently" if dropped else "DeepSpeed refuses it"


def _stated(key: str, value: object, name: str, place: str) -> Stated | None:
    """A setting in the recipe's words; None where a recipe has no such setting."""
    if key in REQUIRED:
        target, meaning = f"deepspeed.{key}", value
    elif key == "scheduler.type":
        target, meaning = "schedule.name", _SCHEDULERS.get(str(value), value)
    elif key == "gradient_accumulation_steps":
        target, meaning = ACCUMULATION, value
    else:
        target, meaning = OWNED.get(key) or _ELSEWHERE.get(key, ""), value
    if not target:
        return None
    if target == "optimizer.clip_grad_norm" and value == 0:
        meaning = None
    elif target == "optimizer.name":
        meaning = str(value).lower()
    elif key.endswith(".device"):
        meaning = device(value)
    elif ".cpu_offload" in key:
        meaning = "cpu" if value else "none"
    elif target == "schedule.name":
        meaning = translated(target, meaning)
    return Stated(target, AUTO if value == AUTO else meaning, name, shown(value), place)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, object]]:
    leaves: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            leaves += _leaves(value, f"{prefix}{name}.")
        else:
            leaves.append((f"{prefix}{name}", value))
    return leaves


def _is_named(path: Path, recipe: Recipe) -> bool:
    """Whether the recipe's own `parallel.zero.config` is this file."""
    config = recipe.parallel.zero.config
    return config is not None and open_config(config).path.resolve() == path.resolve()
