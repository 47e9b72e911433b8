"""`dmt plan`: a recipe's layout, its speed and the reasons. Starts nothing."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from toolkit.cli import plan_tables
from toolkit.cli.options import AsJson, Overrides
from toolkit.cli.output import output
from toolkit.errors import EXIT_USER_ERROR, PlanError
from toolkit.intake.load import load_recipe
from toolkit.plan.alternatives import other_engines, over, what_if
from toolkit.plan.dimensions import batch_text, layout_text, recompute_text
from toolkit.plan.estimate import Estimate, Room, derivations, machine_output, memory_parts
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.plan.ledger import LedgerEntry, named
from toolkit.plan.planned import Planned, plan_recipe
from toolkit.plan.reasons import compared_engines, why
from toolkit.run.announce import ledger_of
from toolkit.text.terminal import tell
from toolkit.text.units import GIB, MIB_PER_GIB, human, seconds, size

_ROOM: dict[Room, str] = {"fits": "green", "tight": "yellow", "does not fit": "red"}
_SHOWN = 8
"""How many strategies the table shows."""
_SMALL = 0.01
"""Parts below this share of the whole are shown as one."""

Clusters = Annotated[
    list[str],
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Instead of the recipe's cluster: NODESxGPUSxNAME, e.g. 4x8xh100-80gb, or a "
        "cluster file. Repeat it to compare clusters.",
    ),
]

LayoutFlags = Annotated[
    Literal["megatron-lm"] | None,
    typer.Option(help="Print only the layout, as flags of this tool's own scripts."),
]


def plan(
    recipes: Annotated[
        list[Path], typer.Argument(metavar="RECIPE", help="Files, or names of `dmt recipes`.")
    ],
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    clusters: Clusters = [],  # noqa: B006
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show every reason, what if, and each formula."),
    ] = False,
    flags: LayoutFlags = None,
    as_json: AsJson = False,
) -> None:
    """Choose a layout for a recipe, and predict memory and speed. Starts nothing.

    Several recipes, or several --cluster, are compared in a table.

    Example: `dmt plan llama-3.1-8b-pretrain --cluster 4x8xh100-80gb`
    """
    places: list[Cluster | None] = [find_cluster(text) for text in clusters]
    planned = [
        _planned(path, overrides, place) for path in recipes for place in places or [None]
    ]
    if flags is not None:
        from toolkit.foreign.megatron_flags import layout_flags

        if len(planned) > 1:
            raise PlanError("--flags: one recipe on one cluster", fix="plan them one by one")
        tell(layout_flags(planned[0].recipe, planned[0].plan), sys.stdout)
        return
    if len(planned) > 1:
        every = [_machine_output(one, explain) for one in planned] if as_json else []
        output(as_json, {"comparison": every}, plan_tables.comparison(planned))
        return
    (one,) = planned
    data = _machine_output(one, explain) if as_json else None
    output(as_json, data, _lines(one, explain))
    if not one.search.fits:
        raise typer.Exit(EXIT_USER_ERROR)


def _planned(path: Path, overrides: Sequence[str], cluster: Cluster | None) -> Planned:
    """Plan a recipe, checked as a whole, on its own cluster or another one."""
    recipe = load_recipe(path, overrides, cluster)
    try:
        return plan_recipe(recipe, cluster)
    except PlanError as error:
        raise PlanError(f"{path}: {error.message}", fix=error.fix) from error


# For programs


def _machine_output(planned: Planned, explain: bool) -> dict[str, Any]:
    """What `--json` prints for one recipe on one cluster."""
    found, plan, run = planned.search, planned.plan, planned.run
    plans = [_entry(one) for one in found.strategies(_SHOWN, stages=True)]
    plans[0] |= {
        "parameters": plan.parameters,
        "trainable_parameters": plan.trainable_parameters,
        "reasons": list(plan.reasons),
        "ledger": [*ledger_of(planned.recipe, plan)],
    }
    data: dict[str, Any] = {
        "recipe": planned.recipe.name,
        "cluster": planned.cluster.name,
        "plans": plans,
        "run": None if run is None else run.machine_output(),
    }
    if not found.fits:
        data["remedies"] = plan.remedies
    if explain:
        data["alternatives"] = [
            {
                "changes": one.changes,
                "memory_gib": one.best.memory_gib,
                "step_time_s": one.best.step_s if one.best.fits else None,
                "room": one.best.room,
            }
            for one in what_if(found)
        ]
        data["derivations"] = derivations(found.best)
    return data


def _entry(one: Estimate) -> dict[str, Any]:
    return {
        "engine": one.pair.engine,
        "model": one.pair.model,
        "layout": one.layout.to_dict(),
        **machine_output(one),
        "peak_gib": one.memory_gib,
        "room": one.room,
    }


# For people


def _lines(planned: Planned, explain: bool) -> Iterator[str | Text]:
    """The chosen layout, its memory and time, the best strategies, and why."""
    plan, found = planned.plan, planned.search
    if not found.fits:
        yield from _shortfall(planned)
        return
    yield from _facts(planned)
    yield ""
    best, *others = found.strategies(_SHOWN, stages=True)
    shown = {one.pair.engine for one in (best, *others)}
    others += [one.best for one in other_engines(found, shown)]
    others.sort(key=lambda one: (not one.fits, one.step_s))
    yield from plan_tables.strategies(best, [best, *others])
    engines = compared_engines(found)
    if {one.pair.engine for one in others} - {*engines}:
        takes = f"auto takes {' or '.join(engines)}, other engines run if you state them"
        yield Text(f"  {takes}", "dim")
    yield ""
    entries = ledger_of(planned.recipe, plan)
    if explain:
        yield from _explained(planned, entries)
        return
    for reason in plan.reasons:
        if "WARNING" in reason:
            yield Text(f"  {reason}", "yellow")
    yield _fact("why", why(found).partition(": ")[2])
    yield _fact("exact but for", named(entries))


def _facts(planned: Planned) -> Iterator[Text]:
    """The model and where it trains. How, how fast, and how long."""
    recipe, plan, layout = planned.recipe, planned.plan, planned.plan.layout
    found, cluster = planned.search.best, planned.cluster
    limited = cluster.gpu.memory_gib is not None
    trained = plan.parameters - plan.frozen_parameters
    of_them = f", {human(trained)} of them trained" if plan.frozen_parameters else ""
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    where = f"{nodes} × {cluster.gpus_per_node} {cluster.gpu.name}"
    yield Text.assemble(
        (recipe.name, "bold"), f"  {human(plan.parameters)} parameters{of_them}; {where}"
    )
    computed = replace(layout, recompute="none")
    degrees, _, *kernels = layout_text(plan.engine, plan.model, computed).split(", ")
    ways = [f"recompute {recompute_text(layout)}", f"attention {plan.attention_kernel}"]
    utilization = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    nominal = "" if limited or cluster.gpu.measured else " (nominal)"
    per = "GPU" if limited else "process"
    yield _fact("layout", degrees)
    yield _fact("batch", batch_text(layout))
    yield _fact("kernels", ", ".join([*ways, *kernels]))
    speed = f"{found.time.tokens_per_s_per_gpu:,.0f} tokens/s per {per}"
    yield from _memory(found)
    yield _fact("step", f"{seconds(found.time.total_s)}{nominal}: {speed}{utilization}")
    yield _time(found)
    if (run := planned.run) is not None:
        yield _fact("run", str(run))
    elif (epochs := recipe.training.epochs) is not None:
        each = 1000 * found.time.total_s / layout.global_batch
        passes = f"{epochs:g} epoch{'s' * (epochs != 1)} of data that is not read here"
        yield _fact("run", f"{passes}: {seconds(each)} for each 1,000 samples")


def _fact(label: str, value: str) -> Text:
    return Text.assemble((f"  {label:<7}  ", "dim"), value)


def _memory(found: Estimate) -> Iterator[Text]:
    """The memory of a device by part, and whether it fits. Then that of a node, and its
    disk."""
    needed, total, capacity = found.memory_gib, found.memory.total / GIB, found.capacity_gib
    stage = f", pipeline stage {found.memory.stage}" if found.layout.pp > 1 else ""
    line = _fact("memory", f"{size(total)} per process")
    if capacity is not None:
        verdict = f"{1 - needed / capacity:.0%} free" if found.fits else found.room
        line = _fact("memory", f"{needed:.1f} of {capacity:.4g} GiB, ")
        line.append(verdict, _ROOM[found.room])
    unit = 1.0 if capacity or total >= 1 else 1 / MIB_PER_GIB
    yield line.append(f"{stage}: {_parts(memory_parts(found.memory), unit)}")
    if needed > total * 1.001:
        yield _fact("", f"{needed:.1f} GiB while the model is built")
    for place, taken in (("host", found.host_gib), ("NVMe", found.nvme_gib)):
        if taken:
            yield _fact(place, f"{taken:,.0f} GiB of each node")


def _time(found: Estimate) -> Text:
    """The time of a step by part."""
    name, unit = ("s", 1.0) if found.time.total_s >= 1 else ("ms", 1e-3)
    return _fact("time", f"in {name}: {_parts(found.time.parts, unit)}")


def _parts(parts: Mapping[str, float], unit: float) -> str:
    """Parts of a whole in a unit. Small parts are shown as their sum."""
    large = {part: one for part, one in parts.items() if one >= _SMALL * sum(parts.values())}
    large["other"] = sum(parts.values()) - sum(large.values())
    shown = (
        f"{part.replace('_', ' ').replace(':', ' for')} {one / unit:,.2f}"
        for part, one in large.items()
        if one > 0
    )
    return ", ".join(shown)


def _shortfall(planned: Planned) -> Iterator[Text]:
    """How much memory is missing, and which options would make the recipe fit."""
    found, cluster = planned.search, planned.cluster
    yield Text.assemble(
        (planned.recipe.name, "bold"), f" on {cluster.name}: ", ("does not fit", "red")
    )
    yield Text(f"  {over(found)}:")
    yield Text(f"  {layout_text(*found.nearest.pair, found.nearest.layout)}")
    host = f"{cluster.host_memory_gib:,g} GiB of host memory per node"
    yield Text(f"  {host}: host_memory_gib of a cluster file states another size", "dim")
    yield Text("")
    if found.nearest.memory_gib > (found.nearest.capacity_gib or math.inf):
        yield from _memory(found.nearest)
        yield Text("")
    if not planned.plan.remedies:
        yield Text("  no single change, and no larger cluster, makes it fit")
        return
    yield Text("  what would fit, by what it gives up        GPU       host     step", "dim")
    for one in planned.plan.remedies:
        sizes = f"{one.memory_gib:.1f} GiB {one.host_gib:>6,.0f} GiB {seconds(one.step_s):>8}"
        yield Text.assemble("  ", (f"{one.gives_up:<36}", "bold"), f" {sizes:>29}")
        yield Text(f"    {one.options}")
        yield Text(f"    {one.layout}", "dim")


def _explained(planned: Planned, entries: Sequence[LedgerEntry]) -> Iterator[Text]:
    """Every reason, what other values would cost, the formulas, and the ledger."""
    found = planned.search
    yield Text("  why", "dim")
    for reason in planned.plan.reasons:
        yield Text(f"  - {reason}", "yellow" if "WARNING" in reason else "")
    yield Text("  what if: the best plan with one setting changed", "dim")
    yield from plan_tables.alternatives(found)
    yield from plan_tables.formulas(derivations(found.best))
    exact = "exact, compared with one process in fp32"
    yield Text(f"  {exact}{', but for' if entries else ''}", "dim")
    for entry in entries:
        yield Text.assemble("  - ", (entry.what, "bold"), f": {entry.why}")
