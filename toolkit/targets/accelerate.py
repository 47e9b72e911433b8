"""Accelerate's settings: its config file, and the corresponding variables.

Both use the same names, those of `accelerate launch`'s own arguments: it copies every section
of the file into them and then into ACCELERATE_*, FSDP_* and others (accelerate 1.15,
`commands/launch.py` and `utils/launch.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed.json_file import JsonFile, parse_json, read_json
from toolkit.targets import deepspeed_json
from toolkit.targets.known_keys import ACCELERATE, SECTIONS
from toolkit.targets.source import (
    ACCUMULATION,
    ACTIVATIONS_OFFLOADED,
    COMPILED,
    CONTEXT_PARALLEL,
    REPLICAS,
    SHARDS,
    WORLD,
    Collected,
    OneOf,
    SettingSource,
    Stated,
    Unknown,
    device,
    relative_to_file,
    shown,
    translated,
    unknown,
)

KIND = "Accelerate config"

ENGINES: Mapping[str, str] = {
    kind: engine for engine in BACKENDS.names for kind in BACKENDS[engine].distributed_types
}
"""Accelerate's `distributed_type` → the engine that trains so."""

_STAGES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "1": 3, "2": 2, "3": 0}
_SECTION_OF_TYPE = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
}
_MAPS = {*SECTIONS, "tpu_env"}
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}

_SAME: Mapping[str, str] = {
    "num_processes": WORLD,
    "num_machines": "cluster.nodes",
    "zero_stage": "parallel.zero.stage",
    "gradient_accumulation_steps": ACCUMULATION,
    "offload_optimizer_nvme_path": "parallel.zero.nvme_path",
    "offload_param_nvme_path": "parallel.zero.nvme_path",
    "parallelism_config_tp_size": "parallel.tensor",
    "parallelism_config_cp_size": CONTEXT_PARALLEL,
    "parallelism_config_dp_shard_size": SHARDS,
    "parallelism_config_dp_replicate_size": REPLICAS,
    "megatron_lm_tp_degree": "parallel.tensor",
    "megatron_lm_pp_degree": "parallel.pipeline",
    "megatron_lm_context_parallel_size": CONTEXT_PARALLEL,
    "megatron_lm_expert_model_parallel_size": "parallel.expert",
    "megatron_lm_num_micro_batches": ACCUMULATION,
    "megatron_lm_sequence_parallelism": "parallel.sequence",
}
"""Settings that a recipe has with the same meaning."""

_OFFLOADS = {
    "offload_optimizer_device": "parallel.zero.offload_optimizer",
    "offload_param_device": "parallel.zero.offload_parameters",
}
_FSDP_1 = OneOf(("fsdp 1",))
"""No engine of DMT's: it has FSDP's version 2."""
_VERSION_UNSTATED = "state fsdp_version 2 (without it, it is 1), or change distributed_type"

_CLIPPING = ("gradient_clipping", "megatron_lm_gradient_clipping")


@dataclass(frozen=True)
class AccelerateSetting:
    """One of Accelerate's settings, wherever it was found."""

    value: Any
    name: str
    """What it is called there."""
    place: str
    written: str = ""
    """How it is written there, where that is not the value."""


def read(file: JsonFile, name: str) -> SettingSource:
    """What an Accelerate config file states."""
    found = Collected()
    settings: dict[str, AccelerateSetting] = {}
    kind = str(file.values.get("distributed_type", "NO"))
    for key, value in file.values.items():
        if key not in ACCELERATE:
            found.unknown.append(unknown(key, file.place(key), ACCELERATE))
        elif value is not None and isinstance(value, Mapping) != (key in _MAPS):
            found.unknown.append(Unknown(key, file.place(key), _wrong_kind(value)))
        elif key == "tpu_env":
            found.only_there.append(key)
        elif isinstance(value, Mapping):
            asleep = _SECTION_OF_TYPE.get(key, kind) != kind
            settings |= _section(file, key, value, found, asleep)
        elif value is not None:
            settings[key] = AccelerateSetting(value, key, file.place(key))
    found.add(collect(settings, file.path))
    return found.source(
        name,
        KIND,
        "recipe",
        "`accelerate launch --config_file` … launch/train.py RECIPE: starts num_processes, and "
        "DMT refuses a number that differs from the recipe's; otherwise the recipe takes "
        "precedence",
        "`accelerate launch` of a script with its own Accelerator: this file takes precedence",
    )


def _wrong_kind(value: object) -> str:
    return "a map, where one value belongs" if isinstance(value, Mapping) else "not a map"


def _section(
    file: JsonFile, section: str, values: Mapping[str, Any], found: Collected, asleep: bool
) -> dict[str, AccelerateSetting]:
    """Settings of one block; those of a distributed_type that is not chosen do nothing."""
    settings = {}
    prefix = _PREFIXES.get(section, "")
    for key, value in values.items():
        name = f"{section}.{key}"
        argument = key if key.startswith(prefix) else prefix + key
        if argument not in SECTIONS[section]:
            found.unknown.append(unknown(name, file.place(name), SECTIONS[section]))
        elif isinstance(value, Mapping):
            found.unknown.append(Unknown(name, file.place(name), _wrong_kind(value)))
        elif asleep:
            found.only_there.append(f"{name} (not in effect)")
        elif value is not None:
            settings[argument] = AccelerateSetting(value, name, file.place(name))
    return settings


def collect(settings: Mapping[str, AccelerateSetting], path: Path) -> Collected:
    """What settings by the names of `accelerate launch`'s arguments state.

    `path` is the file that they come from. Raises RecipeError when the DeepSpeed config that
    they name cannot be read.
    """
    found = Collected()
    for key, setting in settings.items():
        stated = tuple(_stated(key, setting, settings))
        found.stated += stated
        if not stated and key != "deepspeed_config_file":
            found.only_there.append(setting.name)
    if config := settings.get("deepspeed_config_file"):
        found.add(_deepspeed(config, path))
    return found


def _stated(
    key: str, setting: AccelerateSetting, settings: Mapping[str, AccelerateSetting]
) -> Iterator[Stated]:
    """A setting in the recipe's terms; empty if a recipe has none."""
    value = setting.value

    def stated(target: str, meant: object, winner: str = "", advice: str = "") -> Stated:
        at = (setting.name, setting.written or shown(value), setting.place)
        return Stated(target, meant, *at, winner, advice)

    if key == "num_processes":
        yield stated(WORLD, value, "refused", _start_as_many(setting))
    elif key in _SAME:
        yield stated(_SAME[key], value)
    elif key == "distributed_type":
        if value == "FSDP" and "fsdp_version" not in settings:
            yield stated("parallel.engine", _FSDP_1, "", _VERSION_UNSTATED)
        else:
            yield stated("parallel.engine", ENGINES.get(str(value), str(value)))
    elif key == "mixed_precision":
        yield stated("training.precision", translated("training.precision", value))
    elif key == "dynamo_backend":
        yield stated(COMPILED, str(value).lower() not in ("no", "false"))
    elif key == "use_cpu" and value is True:
        yield stated("cluster.gpu", "cpu")
    elif key in _OFFLOADS:
        yield stated(_OFFLOADS[key], device(value))
    elif key in _CLIPPING:
        yield stated("optimizer.clip_grad_norm", value or None)
    elif key == "megatron_lm_recompute_activations":
        yield stated("parallel.recompute", "selective" if value else OneOf(("none", "full")))
    elif key == "megatron_lm_use_distributed_optimizer":
        yield stated("parallel.zero.stage", 1 if value else 0)
    else:
        yield from _fsdp(key, setting, settings, stated)


def _fsdp(
    key: str, setting: AccelerateSetting, settings: Mapping[str, AccelerateSetting], stated: Any
) -> Iterator[Stated]:
    """FSDP's part; DMT's own engine is version 2, which has no `sharding_strategy`."""
    version = settings.get("fsdp_version")
    second = version is not None and str(version.value) == "2"
    value = setting.value
    on = str(value).lower() in ("true", "yes", "on", "1")
    if key == "fsdp_version":
        yield stated("parallel.engine", ENGINES["FSDP"] if second else _FSDP_1)
    elif key == "fsdp_sharding_strategy" and not second and str(value).upper() in _STAGES:
        yield stated("parallel.zero.stage", _STAGES[str(value).upper()])
    elif key == "fsdp_reshard_after_forward" and second:
        yield stated("parallel.zero.stage", 3 if on else OneOf((1, 2)))
    elif key == "fsdp_offload_params":
        yield stated("parallel.zero.offload_parameters", "cpu" if on else "none")
    elif key == "fsdp_activation_checkpointing_offload":
        yield stated(ACTIVATIONS_OFFLOADED, on)
    elif key == "fsdp_activation_checkpointing":
        yield stated("parallel.recompute", "full" if on else OneOf(("none", "selective")))


def _start_as_many(setting: AccelerateSetting) -> str:
    return (
        f"change {setting.name} at {setting.place}, or --set cluster.nodes=N --set "
        "cluster.gpus_per_node=M"
    )


def _deepspeed(config: AccelerateSetting, path: Path) -> Collected:
    """The DeepSpeed config that is named, as if it were part of these settings."""
    text = str(config.value)
    if text.lstrip().startswith("{"):  # Accelerate accepts the JSON itself instead of a name
        return deepspeed_json.collect(_inside(text, config, path))
    named = relative_to_file(text, path)
    if not named.exists():
        missing = Collected()
        missing.unknown.append(Unknown(config.name, config.place, f"there is no file {named}"))
        return missing
    return deepspeed_json.collect(read_json(named))


def _inside(text: str, config: AccelerateSetting, path: Path) -> JsonFile:
    """DeepSpeed's JSON that stands as a block in the file at `path`, or in a variable."""
    _, _, line = config.place.rpartition(":")
    first = int(line) if line.isdecimal() else 0
    found = parse_json(text, path)
    lines = {key: first + number for key, number in found.lines.items()} if first else {}
    return JsonFile(path if first else Path(config.place), found.values, lines)
