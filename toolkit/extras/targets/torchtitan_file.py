"""The texts of torchtitan: its TOML, and command lines with overrides of one."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets.shell_flags import read_flags
from toolkit.extras.targets.values import JoinedFiles
from toolkit.targets.base import as_yaml, relative_to_file
from toolkit.targets.options import read_options
from toolkit.text.dotted import leaves

OPTIONS = read_options("torchtitan", __file__)
NAMES = OPTIONS.names
_SECTIONS = frozenset(name.partition(".")[0] for name in NAMES)
_CONFIG_FILE = re.compile(r"\bCONFIG_FILE=(?:\"([^\"]+)\"|'([^']+)'|(\S+))")
_PYTHON = re.compile(r"(?:^|\s)--module[\s=]|\bMODULE=\S+")


def parse(text: str, path: Path) -> JsonFile | None:
    """See `Target.parse`. Raises RecipeError for TOML that is none, and for Python configs."""
    if path.suffix == ".toml":
        values, lines = _toml(text, path)
        is_ours = any(name.partition(".")[0] in _SECTIONS for name in values)
        return JsonFile(path, values, lines) if is_ours else None
    named = _CONFIG_FILE.search(text)
    is_python = path.suffix == ".py" and "torchtitan" in text
    if is_python or (_PYTHON.search(text) and "--config" in text):
        raise _python(path)
    if path.suffix == ".py":
        return None
    values, lines = {}, {}
    for flag in read_flags(text, str(path)):
        name = flag.name.removeprefix("--").replace("-", "_")
        on = name.replace(".no_", ".", 1) if name not in NAMES else name
        if "." in name and name.partition(".")[0] in _SECTIONS:
            values[on] = as_yaml(flag.values[0]) if flag.values else on == name
            lines[on] = flag.line
    config = values.get("job.config_file", named and next(filter(None, named.groups())))
    overrides = JsonFile(path, values, lines)
    if config is not None:
        return _below(overrides, str(config))
    return overrides if values else None


def join(files: Sequence[JsonFile]) -> JsonFile:
    """A config and its overrides, whatever their order."""
    joined = JoinedFiles.of(sorted(files, key=lambda file: file.path.suffix != ".toml"))
    values = {key: joined.values[key] for key in joined.values if key != "job.config_file"}
    is_whole = joined.path.suffix == ".toml"
    return replace(joined, values=values if is_whole else joined.values)


def _toml(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Values and lines by dotted names."""
    try:
        values = dict(leaves(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError([Problem("TOML", str(error), "TOML", "", str(path))]) from error
    lines, section = {}, ""
    for line, row in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([\w.-]+)\]", row):
            section = header[1]
        elif key := re.match(r"\s*([\w.-]+)\s*=", row):
            lines[f"{section}.{key[1]}" if section else key[1]] = line
    return values, lines


def _python(path: Path) -> RecipeError:
    found = "a config in Python (torchtitan's --module and --config)"
    allowed = "a TOML config, or overrides `--section.key value`: code is not run"
    fix = "write its values as overrides into a file, e.g. `--training.steps 1000`"
    return RecipeError([Problem("--from", found, allowed, fix, str(path))])


def _below(overrides: JsonFile, config: str) -> JsonFile:
    """The overrides on top of the config file that their command names, if it is here."""
    named = relative_to_file(config, overrides.path)
    if not named.is_file():
        values = {**overrides.values, "job.config_file": config}
        return JsonFile(overrides.path, values, overrides.lines)
    below = JsonFile(named, *_toml(named.read_text(encoding="utf-8"), named))
    return join((below, overrides))
