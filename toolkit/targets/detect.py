"""Detects the kind of a file, and reads its settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed import keys as deepspeed_keys
from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.errors import Problem, RecipeError
from toolkit.recipe import yaml_nodes
from toolkit.recipe.schema import Recipe
from toolkit.targets import accelerate, deepspeed_json, megatron_arguments, training_arguments
from toolkit.targets.known_keys import ACCELERATE, OLD_TRAINING_ARGUMENTS, TRAINING_ARGUMENTS
from toolkit.targets.source import SettingSource

KINDS = (
    "a DeepSpeed config (JSON), an Accelerate config (YAML or JSON), TrainingArguments (JSON "
    "or YAML), Megatron-LM arguments (text), or `env`"
)

_KEYS: Mapping[str, frozenset[str]] = {
    deepspeed_json.KIND: deepspeed_keys.KNOWN_KEYS[""],
    accelerate.KIND: ACCELERATE,
    training_arguments.KIND: TRAINING_ARGUMENTS | OLD_TRAINING_ARGUMENTS,
}


def read_source(path: Path, recipe: Recipe) -> SettingSource:
    """The settings of the file at `path`, of any known kind.

    Raises RecipeError if it cannot be read or its kind is unknown.
    """
    text = _text(path)
    start = text.lstrip()
    if start.startswith("{"):
        return _of_settings(read_json(path, "JSON file"), recipe)
    if path.suffix.lower() in (".yaml", ".yml"):
        return _of_settings(_read_yaml(path, text), recipe)
    if any(word.startswith("--") for word in text.split()):
        return megatron_arguments.read(text, str(path))
    raise _no_kind(path, "a text without `--flags`")


def _of_settings(file: JsonFile, recipe: Recipe) -> SettingSource:
    """By whose names its top-level keys are, most of them."""
    scores = {kind: len(keys & file.values.keys()) for kind, keys in _KEYS.items()}
    # A setting that two of them have (`fp16`) is a block for DeepSpeed only.
    blocks = sum(
        isinstance(file.values.get(key), dict) for key in ("fp16", "bf16", "optimizer")
    )
    scores[deepspeed_json.KIND] += blocks
    kind = max(scores, key=lambda kind: scores[kind])
    if scores[kind] == 0:
        if {"model", "training", "data", "extends"} & file.values.keys():
            raise _no_kind(file.path, "a recipe")
        raise _no_kind(file.path, f"settings {', '.join(list(file.values)[:5]) or 'none'}")
    name = str(file.path)
    if kind == deepspeed_json.KIND:
        return deepspeed_json.read(file, name, recipe)
    if kind == accelerate.KIND:
        return accelerate.read(file, name)
    return training_arguments.read(file, name)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(yaml_nodes.MAX_BYTES + 1)
        if len(data) > yaml_nodes.MAX_BYTES:
            raise _no_kind(path, f"more than {yaml_nodes.MAX_BYTES // 1024} KiB")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise _no_kind(path, error.strerror or str(error)) from error
    except ValueError as error:  # not UTF-8, or a null character in the path
        raise _no_kind(path, str(error)) from error


def _no_kind(path: Path, found: str) -> RecipeError:
    return RecipeError([Problem("--against", found, KINDS, "", str(path))])


def _read_yaml(path: Path, text: str) -> JsonFile:
    """A YAML map with the line of each key, in the form of a JSON file."""
    node, problems = yaml_nodes.parse(text, str(path))
    if problems:
        raise RecipeError(problems)
    if not isinstance(node, yaml_nodes.Mapping):
        raise _no_kind(path, "a YAML file that is no map")
    values: dict[str, Any] = yaml_nodes.to_data(node)
    return JsonFile(path, values, dict(_lines(node, "")))


def _lines(node: yaml_nodes.Mapping, prefix: str) -> Iterator[tuple[str, int]]:
    for name, entry in node.entries.items():
        yield f"{prefix}{name}", entry.place.line
        if isinstance(entry.node, yaml_nodes.Mapping):
            yield from _lines(entry.node, f"{prefix}{name}.")
