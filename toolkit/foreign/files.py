"""Reads a file of another tool: its kind, its settings, and what they state of a recipe."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile, read_json
from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.foreign.blocks import deepspeed, setting_of
from toolkit.foreign.carry import ForeignSetting, Found, Left, carry
from toolkit.foreign.rules import RULES
from toolkit.foreign.shell import read_flags
from toolkit.foreign.tables import ForeignTool, tool, tools
from toolkit.recipe import yaml_text
from toolkit.recipe.yaml_text import resolve_plain
from toolkit.system.untrusted import read_bytes

SECTIONS = {
    "deepspeed_config": ("", "DEEPSPEED"),
    "fsdp_config": ("fsdp_", "FSDP"),
    "megatron_lm_config": ("megatron_lm_", "MEGATRON_LM"),
    "parallelism_config": ("parallelism_config_", ""),
    "fp8_config": ("fp8_", ""),
    "dynamo_config": ("dynamo_", ""),
    "mpirun_config": ("", ""),
}
"""Accelerate's blocks: the prefix of their settings, and the distributed_type they are for."""


def read(path: Path, option: str) -> Found:
    """What the file at `path` states. `problems` has what is not understood.

    Raises RecipeError, on `option`, for a file that cannot be read or is of no known kind, and
    PlanError for a program.
    """
    if path.suffix == ".py":
        raise PlanError(
            f"{option}: {path} is a program, and dmt runs and reads no foreign code",
            fix="docs/coming-from.md has what of your script a recipe states",
        )
    try:
        kind, file = _recognised(path)
    except _NoKind as error:
        kinds = ", ".join(one.form for one in tools())
        fix = "name a whole file of one of these kinds"
        raise RecipeError([Problem(option, str(error), kinds, fix, str(path))]) from error
    undecided: Sequence[Left] = ()
    if kind is tool("deepspeed"):
        return deepspeed(file)
    if kind.key == "megatron_lm":
        settings, undecided = _of_flags(file)
    elif kind.key == "accelerate":
        settings, undecided = _of_accelerate(file)
    else:
        settings = {
            kind.renamed.get(name, name): setting_of(file, name, value)
            for name, value in file.values.items()
        }
    found = carry(kind, settings)
    found.left += undecided
    RULES[kind.key](found, settings, file)
    return found


def _of_accelerate(file: JsonFile) -> tuple[dict[str, ForeignSetting], list[Left]]:
    """Settings by the names of `accelerate launch`'s arguments, and those of blocks that the
    distributed_type leaves unread."""
    settings, left = {}, []
    kind = str(file.values.get("distributed_type", "NO"))
    for key, value in file.values.items():
        prefix, of_kind = SECTIONS.get(key, ("", ""))
        if key not in SECTIONS:
            settings[key] = setting_of(file, key, value)
        elif not isinstance(value, Mapping):
            if value:
                problem = setting_of(file, key, value).problem("a map of settings")
                raise RecipeError([problem])
        else:
            for name, one in value.items():
                at = setting_of(file, f"{key}.{name}", one)
                if of_kind not in ("", kind):
                    left.append(Left(at, f"not in effect: {kind}", changes=False))
                else:
                    settings[name if name.startswith(prefix) else prefix + name] = at
    return settings, left


def _of_flags(file: JsonFile) -> tuple[dict[str, ForeignSetting], list[Left]]:
    """argparse takes a name with either kind of dash, and the last of several."""
    settings = {}
    for name, (flag, values) in file.values.items():
        value: Any = resolve_plain(_plain(values[0])) if len(values) == 1 else [*values]
        settings[name] = ForeignSetting(
            flag, value if values else True, str(file.path), file.lines[name]
        )
    left = []
    for name, line in file.lines.items():
        if name.startswith("?"):
            at = ForeignSetting(name[1:], None, str(file.path), line)
            left.append(Left(at, "in a branch that only the shell can decide"))
    return settings, left


def _plain(text: str) -> str:
    """A number that Python reads as one: `1_000`."""
    digits = text.replace("_", "")
    return digits if digits.isdecimal() and "__" not in text else text


class _NoKind(Exception):
    """Why a file is of no known kind."""


def _recognised(path: Path) -> tuple[ForeignTool, JsonFile]:
    text = _text(path)
    if path.suffix.lower() in (".yaml", ".yml"):  # which may also begin with a brace
        return _by_names(_read_yaml(path, text))
    if text.lstrip().startswith("{"):
        return _by_names(read_json(path, "JSON file"))
    if not any(word.startswith(("--", '"--', "'--")) for word in text.split()):
        raise _NoKind("a text without `--flags`")
    flags, undecided = read_flags(text, str(path))
    values = {flag.name.replace("_", "-"): (flag.name, flag.values) for flag in flags}
    lines = {flag.name.replace("_", "-"): flag.line for flag in flags}
    lines |= {f"?{flag.name}": flag.line for flag in undecided}
    return tool("megatron_lm"), JsonFile(path, values, lines)


def _by_names(file: JsonFile) -> tuple[ForeignTool, JsonFile]:
    """The tool of a file: the one whose table has most of its top-level names."""
    if {"model", "training", "data", "extends"} & file.values.keys():
        raise _NoKind("a recipe, or a format that dmt does not read")
    scores = {one: one.known(file.values) for one in tools()}
    blocks = (file.values.get(key) for key in ("fp16", "bf16", "optimizer"))
    if "deepspeed_config" not in file.values and any(
        isinstance(one, Mapping) for one in blocks
    ):
        scores[tool("deepspeed")] += 2
    best = max(scores, key=lambda one: scores[one])
    if not scores[best]:
        raise _NoKind(f"settings {', '.join(map(str, [*file.values][:5])) or 'none'}")
    alike = [one for one, score in scores.items() if score == scores[best]]
    if not all(best.names <= one.names for one in alike):
        raise _NoKind(f"settings of {', '.join(one.name for one in alike)} alike")
    return best, file


def _text(path: Path) -> str:
    try:
        return read_bytes(path, yaml_text.MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise _NoKind(error.strerror or str(error)) from error
    except ValueError as error:  # too large, not UTF-8, or a null character in the path
        raise _NoKind(str(error)) from error


def _read_yaml(path: Path, text: str) -> JsonFile:
    """A YAML map as PyYAML reads it, with the line of each key."""
    stated, problems = yaml_text.parse(text, str(path), is_foreign=True)
    if problems:
        raise RecipeError(problems)
    if not isinstance(stated.data, dict):
        raise _NoKind("a YAML file that is no map")
    lines = {yaml_text.dotted(path): place.line for path, place in stated.places.items()}
    return JsonFile(path, stated.data, lines)
