"""NVIDIA's published settings of Megatron next to what DMT renders for the same layout.

    python benchmarks/megatron_switches.py [--write docs/gpu.md]

The settings, their sources and why DMT's differ are in megatron_switches.json; DMT's side is
rendered from the shipped recipes by the code that launches them. What is not rendered has
megatron-core's default. Takes half a minute.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import document  # next to this script

from toolkit.backend import BACKENDS
from toolkit.engines.megatron.fields import check_fields, installed_fields
from toolkit.intake.load import load_recipe
from toolkit.launchers.job import job_of
from toolkit.run.assignment import decide

HERE = Path(__file__).parent
PUBLISHED: Mapping[str, Any] = json.loads(
    (HERE / "megatron_switches.json").read_text(encoding="utf-8")
)
COMMON = (
    "parallel.engine=megatron", "parallel.zero.stage=1", "training.micro_batch_size=1",
    "training.sequence_length=8192",
)  # fmt: skip


class Switch(NamedTuple):
    """One published setting."""

    name: str
    place: str
    """Section and field of what DMT renders."""
    theirs: object
    why: str
    """Why DMT's is another one; empty where it is the same."""


def switches(name: str) -> Iterator[tuple[Switch, object]]:
    """The published settings of a model, each with DMT's value."""
    published = PUBLISHED[name]
    recipe = load_recipe(
        HERE.parent / f"recipes/llama/{published['recipe']}.yaml",
        (*COMMON, *published["settings"]),
    )
    assignment = decide(recipe, Path("runs/switches"))
    plan = assignment.plan
    rendered = BACKENDS[plan.engine].render(assignment.recipe, plan.layout)
    check_fields(rendered)
    layout = dataclasses.asdict(plan.layout) | {"global_batch": plan.layout.global_batch}
    sections = {
        **rendered,
        "layout": layout,
        "plan": {"attention_kernel": plan.attention_kernel},
        "env": job_of(assignment).env,
    }
    for entry in published["switches"]:
        switch = Switch(*entry)
        section, field = switch.place.split(".")
        values = sections[section]
        if field not in values and section in ("transformer", "ddp", "optimizer"):
            yield switch, _default(section, field)
        else:
            yield switch, values.get(field)


def _default(section: str, field: str) -> object:
    """megatron-core's own value."""
    owner: Any = installed_fields()[section][0]
    return {one.name: one.default for one in dataclasses.fields(owner)}[field]


def table() -> Iterator[str]:
    """All models."""
    for name, published in PUBLISHED.items():
        yield f"**{name}** ({published['source']})"
        yield ""
        yield "| published | theirs | DMT | why another one |"
        yield "|---|---|---|---|"
        for switch, ours in switches(name):
            theirs = _shown(switch.theirs)
            same = "the same" if ours == switch.theirs else _shown(ours)
            yield f"| `{switch.name}` | {theirs} | {same} | {switch.why} |"
        yield ""


def _shown(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


TABLES: document.Tables = {"published switches": table}


def updated(text: str) -> str:
    """The document with its table made again."""
    return document.updated(text, TABLES)


if __name__ == "__main__":
    document.main(__doc__.partition("\n")[0], TABLES)
