"""Tables of `dmt plan`: strategies, or recipes and clusters, side by side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rich.text import Text

from toolkit.cli.output import Table
from toolkit.layout import Layout
from toolkit.plan.alternatives import Alternative, what_if
from toolkit.plan.dimensions import DEGREES, degrees, degrees_text
from toolkit.plan.estimate import Estimate, Room
from toolkit.plan.planned import Planned
from toolkit.plan.search import Search
from toolkit.text.units import GIB, MIB_PER_GIB, seconds, size

MIB = GIB // MIB_PER_GIB
Value = TypeVar("Value")
_ROOM: dict[Room, str] = {"fits": "", "tight": " tight", "does not fit": " too much"}


def strategies(best: Estimate, shown: Sequence[Estimate]) -> Iterator[Text]:
    """The header, and a line per layout, 80 columns wide at most. `best` is the chosen one."""
    used = {field for one in shown for field in degrees(one.layout)}
    columned = [one.field for one in DEGREES if one.field in {"tp", "pp", *used}]
    columns: dict[str, Callable[[Estimate], str]] = {
        "engine": lambda one: degrees_text(*one.pair, one.layout).partition(" ")[0],
        **{name: partial(_degree, name) for name in ("dp", *columned)},
        "zero": lambda one: f"{one.layout.zero_stage}{_offloaded(one.layout)}",
        "recompute": lambda one: str(one.layout.recompute),
        "micro": lambda one: str(one.layout.micro_batch),
        "GiB": _memory,
        "step": lambda one: seconds(one.step_s) if one.fits else "-",
        "slower": lambda one: _slower(one, best),
    }
    table = Table(columns, gap=" ")
    return table.lines(shown, lambda one: "bold" if one is best else "", indent="  ")


def _degree(name: str, candidate: Estimate) -> str:
    return str(getattr(candidate.layout, name))


def _gib(memory_gib: float) -> str:
    return f"{memory_gib:.1f}" if memory_gib >= 1 else f"{memory_gib:.2g}"


def _memory(one: Estimate) -> str:
    return f"{_gib(one.memory_gib)}{_ROOM[one.room]}"


def _slower(one: Estimate, than: Estimate) -> str:
    if one is than or not (one.fits and than.fits):
        return ""
    share = round(one.step_s / than.step_s - 1, 3)
    return f"{share:+.1%}" if share else "same"


def alternatives(found: Search) -> Iterator[Text]:
    """The header, and a line per change of one setting, with the planner's answer."""
    table = Table[Alternative](
        {
            "if the recipe stated": lambda one: one.options.removeprefix("--set "),
            "the plan": lambda one: one.best.room,
            "GiB": lambda one: _gib(one.best.memory_gib),
            "step": lambda one: seconds(one.best.step_s) if one.best.fits else "-",
            "slower": lambda one: _slower(one.best, found.best),
        },
        left=2,
    )
    return table.lines([*what_if(found)], indent="  ")


def comparison(planned: Sequence[Planned]) -> Iterator[Text]:
    """The header, and two lines per recipe and cluster, 80 columns wide at most."""
    columns: dict[str, Callable[[Planned], str]] = {
        "recipe": lambda one: one.recipe.name,
        "cluster": lambda one: one.cluster.name,
        "GiB": lambda one: _memory(one.search.best),
        "step": lambda one: _or_dash(one.plan.step_time_s, seconds),
        "tok/s/GPU": lambda one: _or_dash(one.plan.tokens_per_s_per_gpu, "{:,.0f}".format),
        "MFU": lambda one: _or_dash(one.plan.mfu, "{:.1%}".format),
    }
    header, *lines = Table(columns, left=2).lines(planned)
    yield header
    for one, line in zip(planned, lines, strict=True):
        yield line
        facts = [degrees_text(one.plan.engine, one.plan.model, one.plan.layout)]
        if one.run is not None:
            facts.append(one.run.duration)
            facts += [] if one.run.cost is None else [f"cost {one.run.cost:,.0f}"]
        yield Text(f"  {', '.join(facts)}", "dim")


def formulas(derived: Mapping[str, Mapping[str, Any]]) -> Iterator[Text]:
    """Lines of formulas. First each part of memory and time and each derived symbol: value,
    formula, source. Then the values of all other symbols."""
    for what, rows in derived.items():
        if not rows:
            continue
        yield Text(f"  why each number: {what}", "dim")
        unit = {"memory": "x_bytes", "time": "x_s"}.get(what, "share")
        values: dict[str, float] = {}
        for name, one in rows.items():
            amount = _amount(unit if one["part"] else name, one["value"])
            formula = one["formula"].replace(" * ", " · ")
            source = f"  ({one['source']})" if one["source"] else ""
            yield Text(f"  - {one['part'] or name} {amount} = {formula}{source}")
            values |= {key: value for key, value in one["symbols"].items() if key not in rows}
        shown = ", ".join(f"{key} {_amount(key, value)}" for key, value in values.items())
        yield Text(f"  where {shown}")


def _amount(name: str, value: float) -> str:
    """Format a value in the unit that its name ends with."""
    if name == "share":
        return f"{value:.1%}"
    if not value:
        return "0"
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    if name.endswith("flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if name.endswith("_s"):
        return seconds(value)
    if name.endswith("_bytes"):
        return size(value / GIB) if value >= MIB else f"{value:,.6g} B"
    if value == int(value) and value < 1e8:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e")


def _or_dash(value: Value | None, text: Callable[[Value], str]) -> str:
    return "-" if value is None else text(value)


def _offloaded(layout: Layout) -> str:
    return "" if layout.offload_optimizer == layout.offload_parameters == "none" else "+off"
