"""Accelerate's settings: its config file, and the corresponding variables.

Both use the same names, those of `accelerate launch`'s own arguments: it copies every section
of the file into them and then into ACCELERATE_*, FSDP_* and others (accelerate 1.15,
`commands/launch.py` and `utils/launch.py`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed.json_file import JsonFile, parse_json, read_json
from toolkit.foreign import deepspeed
from toolkit.foreign.base import (
    COMPILED,
    WORLD,
    ForeignSetting,
    Leftover,
    Nearest,
    NotCarried,
    OneOf,
    Result,
    Row,
    Settings,
    SettingSource,
    Stated,
    Target,
    TargetKey,
    Unknown,
    device,
    none_if_zero,
    read_settings,
    relative_to_file,
    translated,
    unknown,
)
from toolkit.foreign.known_keys import ACCELERATE, SECTIONS
from toolkit.foreign.options import read_options
from toolkit.recipe.schema import Recipe
from toolkit.system.interpreter import TRAIN

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
_IDLE = {
    section: f"distributed_type is not {kind}" for section, kind in _SECTION_OF_TYPE.items()
}
_MAPS = {*SECTIONS, "tpu_env"}
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
_JSON = "deepspeed_config_file"

_FSDP_1 = Nearest(ENGINES["FSDP"], "with FSDP 2, where this is version 1")
"""No engine of DMT's: it has FSDP's version 2."""
_VERSION_UNSTATED = "state fsdp_version 2 (without it, it is 1), or change distributed_type"


def _processes(setting: ForeignSetting, _: Settings) -> list[Stated]:
    advice = f"change {setting.name} at {setting.place}, or --set cluster.nodes=N --set "
    advice += "cluster.gpus_per_node=M"
    return [Stated(WORLD, setting.value, setting, "refused", advice)]


def _engine(setting: ForeignSetting, settings: Settings) -> list[Stated]:
    if setting.value == "FSDP" and "fsdp_version" not in settings:
        return [Stated("parallel.engine", _FSDP_1, setting, "", _VERSION_UNSTATED)]
    engine = ENGINES.get(str(setting.value), str(setting.value))
    return [Stated("parallel.engine", engine, setting)]


def _is_second(settings: Settings) -> bool:
    """Whether it is version 2 of FSDP, DMT's own, which has no `sharding_strategy`."""
    return "fsdp_version" in settings and str(settings["fsdp_version"].value) == "2"


def _version(setting: ForeignSetting, settings: Settings) -> list[Stated]:
    engine = ENGINES["FSDP"] if _is_second(settings) else _FSDP_1
    return [Stated("parallel.engine", engine, setting)]


def _strategy(setting: ForeignSetting, settings: Settings) -> list[Stated] | None:
    stage = _STAGES.get(str(setting.value).upper())
    if _is_second(settings) or stage is None:
        return None
    return [Stated("parallel.zero.stage", stage, setting)]


_CONTEXT = ("parallelism_config_cp_size", "parallelism_config_sp_size")
"""Two kinds of context parallel: torch's, and DeepSpeed's Ulysses."""


def _context(setting: ForeignSetting, settings: Settings) -> list[Stated]:
    """The launcher states both, of which one at most is above 1."""
    above = [name for name in _CONTEXT if name in settings and settings[name].value != 1]
    if setting.value == 1 and above:
        return []
    found = [Stated("parallel.context", setting.value, setting)]
    if above and setting is settings.get(_CONTEXT[1]):
        found.append(Stated("kernels.context", "ulysses", setting))
    return found


def _exchange(setting: ForeignSetting, settings: Settings) -> list[Result] | None:
    """What it means only matters where torch's context parallel is on."""
    size = settings.get(_CONTEXT[0])
    if size is None or size.value == 1:
        return None
    if setting.value == "allgather":
        return [Stated("kernels.context", "all_gather", setting)]
    return [NotCarried("without effect on the result", "kernels.context")]


def _reshard(setting: ForeignSetting, settings: Settings) -> list[Stated] | None:
    stage = 3 if _is_on(setting.value) else OneOf((1, 2))
    return [Stated("parallel.zero.stage", stage, setting)] if _is_second(settings) else None


def _is_on(value: object) -> bool:
    return str(value).lower() in ("true", "yes", "on", "1")


KEYS: Mapping[str, Row] = {
    **read_options("accelerate", __file__).rows,
    "num_processes": _processes,
    "distributed_type": _engine,
    "mixed_precision": TargetKey("training.precision", translated("training.precision")),
    "dynamo_backend": TargetKey(
        COMPILED, lambda value: str(value).lower() not in ("no", "false")
    ),
    "use_cpu": lambda setting, _: (
        [Stated("cluster.gpu", "cpu", setting)] if setting.value is True else None
    ),
    "gradient_clipping": TargetKey("optimizer.clip_grad_norm", none_if_zero),
    "offload_optimizer_device": TargetKey("parallel.zero.offload_optimizer", device),
    "offload_param_device": TargetKey("parallel.zero.offload_parameters", device),
    "parallelism_config_cp_size": _context,
    "parallelism_config_sp_size": _context,
    "parallelism_config_cp_comm_strategy": _exchange,
    "megatron_lm_gradient_clipping": TargetKey("optimizer.clip_grad_norm", none_if_zero),
    "megatron_lm_recompute_activations": TargetKey(
        "parallel.recompute", lambda value: "selective" if value else OneOf(("none", "full"))
    ),
    "megatron_lm_use_distributed_optimizer": TargetKey(
        "parallel.zero.stage", lambda value: 1 if value else 0
    ),
    "fsdp_version": _version,
    "fsdp_sharding_strategy": _strategy,
    "fsdp_reshard_after_forward": _reshard,
    "fsdp_offload_params": TargetKey(
        "parallel.zero.offload_parameters", lambda value: "cpu" if _is_on(value) else "none"
    ),
    "fsdp_activation_checkpointing_offload": NotCarried("inputs of layers stay on the GPU"),
    "fsdp_activation_checkpointing": TargetKey(
        "parallel.recompute",
        lambda value: "full" if _is_on(value) else OneOf(("none", "selective")),
    ),
}


class AccelerateTarget(Target):
    """The file of `accelerate launch --config_file`."""

    kind = "Accelerate config"
    form = "an Accelerate config (YAML or JSON)"
    names = ACCELERATE
    who = (
        f"`accelerate launch --config_file` … {TRAIN} RECIPE: starts num_processes, and "
        "DMT refuses a number that differs from the recipe's; otherwise the recipe takes "
        "precedence",
        "`accelerate launch` of a script with its own Accelerator: this file takes precedence",
    )

    def read(self, file: JsonFile, recipe: Recipe | None) -> SettingSource:
        """See `Target`."""
        found = SettingSource(str(file.path), self.kind, self.who)
        settings: dict[str, ForeignSetting] = {}
        kind = str(file.values.get("distributed_type", "NO"))
        for key, value in file.values.items():
            setting = ForeignSetting(key, value, file.place(key))
            if wrong := _wrong(setting, key, ACCELERATE, key in _MAPS):
                found.unknown.append(wrong)
            elif isinstance(value, Mapping) and key in SECTIONS:
                asleep = _SECTION_OF_TYPE.get(key, kind) != kind
                settings |= _section(file, key, value, found, asleep)
            elif value is not None:
                settings[key] = setting
        found.add(collect(settings, file.path))
        return found


TARGET = AccelerateTarget()


def _wrong(
    setting: ForeignSetting, argument: str, known: frozenset[str], belongs_map: bool = False
) -> Unknown | None:
    """A setting that Accelerate does not know, or a map where it takes none, or the reverse."""
    if argument not in known:
        return unknown(setting, known)
    is_map = isinstance(setting.value, Mapping)
    if setting.value in (None, []) or is_map == belongs_map:  # `tpu_env: []` is usual
        return None
    hint = "a map, where one value belongs" if is_map else "not a map"
    return Unknown(setting.name, setting.place, hint)


def _section(
    file: JsonFile, section: str, values: Mapping[str, Any], found: SettingSource, asleep: bool
) -> dict[str, ForeignSetting]:
    """Settings of one block; those of a distributed_type that is not chosen do nothing."""
    settings = {}
    prefix = _PREFIXES.get(section, "")
    for key, value in values.items():
        name = f"{section}.{key}"
        setting = ForeignSetting(name, value, file.place(name))
        argument = key if key.startswith(prefix) else prefix + key
        if wrong := _wrong(setting, argument, SECTIONS[section]):
            found.unknown.append(wrong)
        elif asleep:
            found.leftovers.append(Leftover(setting, f"not in effect: {_IDLE[section]}"))
        elif value is not None:
            settings[argument] = setting
    return settings


def collect(settings: Settings, path: Path) -> SettingSource:
    """What settings by the names of `accelerate launch`'s arguments state.

    `path` is the file that they come from. Raises RecipeError when the DeepSpeed config that
    they name cannot be read.
    """
    own = {name: setting for name, setting in settings.items() if name != _JSON}
    found = read_settings(own, KEYS)
    if _JSON in settings:
        found.add(_deepspeed(settings[_JSON], path))
    return found


def _deepspeed(config: ForeignSetting, path: Path) -> SettingSource:
    """The DeepSpeed config that is named, as if it were part of these settings."""
    text = str(config.value)
    if text.lstrip().startswith("{"):  # Accelerate accepts the JSON itself instead of a name
        return deepspeed.collect(_inside(text, config, path))
    named = relative_to_file(text, path)
    if not named.exists():
        hint = f"there is no file {named}"
        return SettingSource(unknown=[Unknown(config.name, config.place, hint)])
    return deepspeed.collect(read_json(named))


def _inside(text: str, config: ForeignSetting, path: Path) -> JsonFile:
    """DeepSpeed's JSON that stands as a block in the file at `path`, or in a variable."""
    _, _, line = config.place.rpartition(":")
    first = int(line) if line.isdecimal() else 0
    found = parse_json(text, path)
    lines = {key: first + number for key, number in found.lines.items()} if first else {}
    return JsonFile(path if first else Path(config.place), found.values, lines)
