"""Other tools' settings as tables: `TOOL.yaml` next to this file, one for each tool.

- `carry`: from their names to the recipe's settings.
- `must_be`: values without which a file describes another run.
- `assume`: the value of a setting that a file leaves out.
- `defaults`: what the tool does where a file says nothing, by the recipe's keys.
- `changes`: settings without counterpart that change what is learned, by reason.
- `ignored`: settings without counterpart that do not.
- `rules`: names that code reads (`rules.py`).
- `renamed`: older names.
- `shape`, `shape_defaults`: arguments that describe a model, as fields of megatron-core, and
  values of these fields without one. `other_shape`: arguments of models without a config.
- `configs`: by model type, the keys of its config: the field, and a field or value otherwise.

A name may be a pattern: `--log-*`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

TOOLS = ("deepspeed", "accelerate", "trainer", "llama_factory", "axolotl", "megatron_lm")
"""The tools. A table comes before the one that includes it: it has the files that both know."""


@dataclass(frozen=True)
class ForeignRow:
    """How one setting is carried."""

    to: tuple[str, ...] = ()
    """The recipe's settings."""
    words: Mapping[Any, Any] | None = None
    """Their value → ours, or a map of several of our settings. An empty map states nothing. A
    list has further values of ours that the same setting describes."""
    other: str = ""
    """For a value that is not in `words`: `same` carries it, `targets` reads names of layers.
    Otherwise it is refused, unless `changes` or `ignored` is set."""
    changes: str = ""
    """Why a value that the recipe does not take is left out."""
    ignored: bool = False
    off: tuple[Any, ...] = ()
    """Our values that a setting allows which is off. Another setting decides among them."""
    when: Mapping[str, list[Any]] = field(default_factory=dict)
    """Other settings and the values with which this one is in effect."""
    unless_when: Mapping[str, list[Any]] = field(default_factory=dict)
    otherwise: str = ""
    """The reason where `when` does not hold, if training then changes."""
    unless: str = ""
    """A setting of ours next to which this one is not in effect."""
    needs: str = ""
    """A setting of ours without which this one is not carried."""
    share: str = ""
    """The setting of ours that a number below 1 states."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ours that it states in addition."""


@dataclass(frozen=True, eq=False)
class ForeignTool:
    """One tool's table."""

    key: str
    name: str
    form: str
    rows: Mapping[str, ForeignRow]
    must_be: Mapping[str, list[Any]]
    assume: Mapping[str, Any]
    defaults: Mapping[str, Any]
    changes: Mapping[str, str]
    """Reasons by name or pattern."""
    ignored: frozenset[str]
    rules: frozenset[str]
    renamed: Mapping[str, str]
    complete: bool
    """Whether the table has every name of the tool, so that another one is a mistake."""
    shape: Mapping[str, Any]
    shape_defaults: Mapping[str, Any]
    configs: Mapping[str, Mapping[str, list[Any]]]
    other_shape: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        """Every name and pattern of the table."""
        return (
            self.rules | self.ignored | self.other_shape
            | {*self.rows, *self.changes, *self.must_be, *self.shape}
        )  # fmt: skip

    def known(self, names: Iterable[str]) -> int:
        """How many of a file's top-level names it has."""
        own = {*self.renamed, *(one.partition(".")[0] for one in self.names)}
        return sum(any(fnmatchcase(name, one) for one in own) for name in names)

    def depends(self, name: str) -> bool:
        """Whether a setting depends on settings of ours that others state."""
        row = self.rows.get(name)
        return row is not None and bool(row.unless or row.needs)

    def change(self, name: str) -> str:
        """Why a setting changes what is learned. Empty for one that is not listed."""
        return next((text for one, text in self.changes.items() if fnmatchcase(name, one)), "")

    def ignores(self, name: str) -> bool:
        """Whether nothing that is learned depends on a setting."""
        return any(fnmatchcase(name, one) for one in self.ignored)

    def of_other_shape(self, name: str) -> bool:
        """Whether it describes a model that no config made here has."""
        return any(fnmatchcase(name, one) for one in self.other_shape)


def tools() -> tuple[ForeignTool, ...]:
    """Every tool whose files are read."""
    return tuple(map(tool, TOOLS))


@cache
def tool(key: str) -> ForeignTool:
    """The table of one tool."""
    given = _table(key)
    return ForeignTool(
        key=key,
        name=given["tool"],
        form=given["form"],
        rows={name: _row(row) for name, row in given["carry"].items()},
        must_be=given.get("must_be", {}),
        assume=given.get("assume", {}),
        defaults=given.get("defaults", {}),
        changes={one: why for why, names in given["changes"].items() for one in names.split()},
        ignored=_names(given.get("ignored")),
        rules=_names(given.get("rules")),
        renamed=given.get("renamed", {}),
        complete=given.get("complete", False),
        shape=given.get("shape", {}),
        shape_defaults=given.get("shape_defaults", {}),
        configs=given.get("configs", {}),
        other_shape=_names(given.get("other_shape")),
    )


def _table(key: str) -> dict[str, Any]:
    """The file of a tool, next to what it includes. Its own statements come first."""
    text = Path(__file__).with_name(f"{key}.yaml").read_text(encoding="utf-8")
    given: dict[str, Any] = YAML(typ="safe").load(text)
    if (base := given.pop("include", "")) == "":
        return given
    of_base = _table(base)
    for section in ("carry", "assume", "changes", "must_be"):
        given[section] = {**of_base[section], **given.get(section, {})}
    for section in ("ignored", "rules"):
        given[section] = f"{of_base[section]} {given[section]}"
    return given


def _names(text: str | None) -> frozenset[str]:
    return frozenset((text or "").split())


def _row(row: Any) -> ForeignRow:
    given = dict(row) if isinstance(row, dict) else {"to": row}
    to = given.pop("to", ())
    given["more"] = given.pop("and", {})
    given["otherwise"] = given.pop("else", "")
    given["off"] = tuple(given.pop("off", ()))
    return ForeignRow(to=(to,) if isinstance(to, str) else tuple(to), **given)
