"""DeepSpeed's and FSDP's settings: blocks of other tools' files, or files that they name."""

from collections.abc import Mapping
from typing import Any

from toolkit.engines.deepspeed.config import unknown_keys
from toolkit.engines.deepspeed.json_file import JsonFile, parse_json, read_json
from toolkit.engines.deepspeed.keys import KNOWN_KEYS
from toolkit.foreign.carry import (
    OFF,
    ForeignSetting,
    Found,
    Left,
    carry,
    relative_to_file,
)
from toolkit.foreign.tables import tool
from toolkit.text.dotted import is_within, leaves

_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")


def named_json(file: JsonFile, name: str) -> JsonFile:
    """The JSON file that another one names."""
    return read_json(relative_to_file(name, file.path))


def deepspeed_block(file: JsonFile, key: str, config: Any) -> Found:
    """DeepSpeed's settings: in a block, in a text, or in a file that is named."""
    if isinstance(config, Mapping):
        return deepspeed(JsonFile(file.path, config, file.lines), f"{key}.")
    if str(config).lstrip().startswith("{"):  # Accelerate takes the JSON itself, too
        inside = parse_json(str(config), file.path)
        first = file.lines.get(key, 0)
        lines = {name: first + line for name, line in inside.lines.items()}
        return deepspeed(JsonFile(file.path, inside.values, lines))
    return deepspeed(named_json(file, str(config)))


def deepspeed(file: JsonFile, prefix: str = "") -> Found:
    """What a DeepSpeed config states. `prefix` stands before its names in the file."""
    wrong = {one.key: one for one in unknown_keys(JsonFile(file.path, file.values, {}))}
    table = tool("deepspeed")
    wrong = {key: one for key, one in wrong.items() if key not in table.rows}
    settings = {
        key: setting_of(file, prefix + key, value)
        for key, value in leaves(file.values)
        if not is_within(key, wrong)
    }
    found = carry(table, settings)
    for key, problem in wrong.items():
        at = setting_of(file, prefix + key, None)
        if key in KNOWN_KEYS:
            found.problems.append(at.problem(problem.allowed))
        else:
            why = f"DeepSpeed does not know it; {problem.fix}"
            found.left.append(Left(at, why, unknown=True))
    return found


def setting_of(file: JsonFile, name: str, value: Any) -> ForeignSetting:
    """A setting of a file, with its line."""
    return ForeignSetting(name, value, str(file.path), file.lines.get(name, 0))


def add_engine(found: Found, file: JsonFile, config: Any, switch: Any, options: Any) -> None:
    """DeepSpeed's config, or FSDP's switch and its options."""
    if config is not None and config.value not in OFF:
        found.put("parallel.engine", "deepspeed", config)
        found.merge(deepspeed_block(file, config.name, config.value))
    if switch is not None and not any(switch.value == off for off in OFF):
        block = options.value if options is not None and options.value else {}
        source, prefix = file, f"{options.name}." if options is not None else ""
        if isinstance(block, str):
            source, prefix = named_json(file, block), ""
            block = source.values
        if isinstance(block, Mapping):
            found.merge(_fsdp(source, switch, block, prefix))
        else:
            found.problems.append(options.problem("a map of settings"))
    elif options is not None and options.value:
        found.drop(options, "not in effect: fsdp is off", changes=False)


def _fsdp(
    file: JsonFile, switch: ForeignSetting, block: Mapping[str, Any], prefix: str
) -> Found:
    """FSDP's settings by Accelerate's names. `fsdp` itself is true, or has the words that it
    had before transformers 5."""
    words = switch.value.split() if isinstance(switch.value, str) else switch.value
    words = [str(word) for word in words] if isinstance(words, list) else []
    named = {
        f"fsdp_{name.removeprefix('fsdp_')}": setting_of(file, prefix + name, value)
        for name, value in block.items()
        if value is not None
    }
    if "fsdp_cpu_offload" in named:
        named["fsdp_offload_params"] = named.pop("fsdp_cpu_offload")
    implied: dict[str, Any] = {"fsdp_version": 2}
    if "offload" in words:
        implied["fsdp_offload_params"] = True
    version = named["fsdp_version"].value if "fsdp_version" in named else 2
    strategy = next((word for word in words if word in _STRATEGIES), "full_shard")
    if str(version) == "2":
        implied["fsdp_reshard_after_forward"] = strategy in ("full_shard", "hybrid_shard")
    else:
        implied["fsdp_sharding_strategy"] = strategy
        reshards = named.pop("fsdp_reshard_after_forward", None)
        if reshards is not None:  # transformers' name of the strategy
            named["fsdp_sharding_strategy"] = reshards
    stated = {
        name: ForeignSetting(switch.name, value, switch.file, switch.line)
        for name, value in implied.items()
        if name not in named
    }
    found = carry(tool("accelerate"), stated | named)
    found.put("parallel.engine", "fsdp", switch)
    found.tools = ()
    return found
