"""`dmt plan`: a recipe's layout, its speed and the reasons; starts nothing."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from toolkit.backend import BACKENDS
from toolkit.cli import plan_formulas, plan_tables
from toolkit.cli.bars import memory_lines, time_lines
from toolkit.cli.options import AsJson, Overrides
from toolkit.cli.output import output
from toolkit.errors import EXIT_USER_ERROR, PlanError
from toolkit.hardware.catalogue import Gpu
from toolkit.hardware.cluster import Cluster
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout
from toolkit.plan.dimensions import DIMENSIONS, batch_text, recompute_text
from toolkit.plan.estimate import (
    Estimate,
    Setup,
    derivations,
    estimate,
    machine_output,
)
from toolkit.plan.explain import decisions, described
from toolkit.plan.ledger import KINDS, SHOWN, Kind, LedgerEntry
from toolkit.plan.plan import Plan
from toolkit.plan.planned import Planned
from toolkit.plan.remedies import over, prices
from toolkit.plan.search import Candidate, Search
from toolkit.plan.workloads import workload_of
from toolkit.planning import plan_recipe
from toolkit.recipe.schema import ClusterSection
from toolkit.run.announce import ledger_of
from toolkit.text.terminal import tell
from toolkit.text.units import human, seconds

_COLOURS: dict[Kind, str] = {"exact": "green", "approximated": "yellow", "refused": "dim"}

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
        list[Path], typer.Argument(metavar="RECIPE", help="Recipe YAML; several to compare.")
    ],
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    clusters: Clusters = [],  # noqa: B006
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Strategies to show.")] = 5,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the cost of every alternative.")
    ] = False,
    flags: LayoutFlags = None,
    as_json: AsJson = False,
) -> None:
    """Choose a layout for a recipe, explain it, and predict memory and speed. Starts nothing.

    Example: `dmt plan recipes/gpt2/gpt2-124m-pretrain.yaml --cluster 4x8xh100-80gb --top 3`
    """
    places: list[Cluster | None] = [find_cluster(text) for text in clusters]
    if flags is not None:
        _print_flags(recipes, overrides, places)
        return
    planned = [
        _planned(path, overrides, place) for path in recipes for place in places or [None]
    ]
    if len(planned) > 1:
        every = [_machine_output(one, top, explain) for one in planned] if as_json else []
        output(as_json, {"comparison": every}, plan_tables.comparison(planned))
        return
    (one,) = planned
    data = _machine_output(one, top, explain) if as_json else None
    output(as_json, data, _lines(one, top, explain))
    if not one.search.fits:
        raise typer.Exit(EXIT_USER_ERROR)


def _print_flags(
    recipes: Sequence[Path], overrides: Sequence[str], places: Sequence[Cluster | None]
) -> None:
    from toolkit.foreign.megatron_flags import layout_flags

    if len(recipes) > 1 or len(places) > 1:
        raise PlanError("--flags: one recipe on one cluster", fix="plan them one by one")
    planned = _planned(recipes[0], overrides, places[0] if places else None)
    tell(layout_flags(planned.recipe, planned.plan), sys.stdout)


def _planned(path: Path, overrides: Sequence[str], cluster: Cluster | None) -> Planned:
    """A recipe on a cluster, its own or another, for which it is checked as a whole."""
    recipe = load_recipe(path, overrides, cluster)
    try:
        return plan_recipe(recipe, cluster)
    except PlanError as error:
        raise PlanError(f"{path}: {error.message}", fix=error.fix) from error


def layout_estimate(found: Search, one: Candidate) -> Estimate:
    job = found.job
    return estimate(Setup(workload_of(job, one.pair), one.layout, found.cluster))


# For programs


def _machine_output(planned: Planned, top: int, explain: bool) -> dict[str, Any]:
    """What `--json` prints for one recipe on one cluster."""
    found, plan, run = planned.search, planned.plan, planned.run
    plans = [_entry(found, one) for one in found.shortlist(top)]
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
        data["decisions"] = [*decisions(found)]
        data["prices"] = [*prices(found)]
        data["derivations"] = derivations(layout_estimate(found, found.best))
    return data


def _entry(found: Search, one: Candidate) -> dict[str, Any]:
    by_part = layout_estimate(found, one)
    return {
        "engine": one.pair.engine,
        "model": one.pair.model,
        "layout": one.layout.to_dict(),
        **machine_output(by_part),
        "hfu": by_part.time.hfu_causal,
        "peak_gib": one.memory_gib,
        "fits": by_part.fits,
        "room": by_part.room,
    }


# For people


def _lines(planned: Planned, top: int, explain: bool) -> Iterator[str | Text]:
    """The chosen layout by part, the runners-up, why, and the ledger."""
    recipe, plan, found = planned.recipe, planned.plan, planned.search
    if not found.fits:
        yield from _shortfall(planned)
        return
    trained = plan.parameters - plan.frozen_parameters
    of_them = f", {human(trained)} of them trained" if plan.frozen_parameters else ""
    size = f"  {human(plan.parameters)} parameters{of_them}"
    by_part = layout_estimate(found, found.best)
    sections: list[Iterable[str | Text]] = [
        memory_lines(by_part),
        _time_lines(planned, by_part),
        _runner_up_lines(found, top),
        _explained(found) if explain else _reasons(plan),
        plan_formulas.lines(derivations(by_part)) if explain else (),
        _ledger_lines(ledger_of(recipe, plan)),
    ]
    yield Text.assemble((recipe.name, "bold"), size)
    for label, value in layout_facts(plan, recipe.cluster, planned.cluster.gpu):
        yield Text.assemble((f"  {label:<17}", "dim"), value)
    for section in filter(None, sections):
        yield ""
        yield from section


def layout_facts(plan: Plan, cluster: ClusterSection, device: Gpu) -> Iterator[tuple[str, str]]:
    """Pairs of a label and a value."""
    layout = plan.layout
    yield "engine", plan.engine
    yield "model", plan.model
    nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    machines = f"{nodes} × {cluster.gpus_per_node} {device.name}"
    yield "ranks", f"{layout.world:,} = {machines}"
    yield "data parallel", f"{layout.dp:,}"
    yield from _dimension_rows(layout, kernels=False)
    title = BACKENDS[plan.engine].stage_titles.get(layout.zero_stage)
    yield "ZeRO stage", f"{layout.zero_stage} ({title})" if title else str(layout.zero_stage)
    places = {"optimizer": layout.offload_optimizer, "parameters": layout.offload_parameters}
    away = [f"{what} to {place}" for what, place in places.items() if place != "none"]
    yield "offload", ", ".join(away) or "none"
    yield "global batch", batch_text(layout)
    yield "recompute", recompute_text(layout)
    yield from _dimension_rows(layout, kernels=True)


def _dimension_rows(layout: Layout, *, kernels: bool) -> Iterator[tuple[str, str]]:
    """The dimensions in use: kernels, or how ranks share the work."""
    for one in DIMENSIONS:
        if one.shown and one.phrase == kernels and one.used(layout):
            value = getattr(layout, one.field)
            shown = one.named(value) if isinstance(value, tuple) else one.shown.format(value)
            yield one.title or one.name, shown


def _shortfall(planned: Planned) -> Iterator[Text]:
    """How far off, and what would fit, with the options for it."""
    found, cluster = planned.search, planned.cluster
    yield Text.assemble(
        (planned.recipe.name, "bold"), f" on {cluster.name}: ", ("does not fit", "red")
    )
    yield Text(f"  {over(found)},")
    yield Text(f"  with {described(found.nearest)}")
    yield Text(
        f"  {cluster.host_memory_gib:,g} GiB of host memory per node: host_memory_gib of", "dim"
    )
    yield Text("  a cluster file (--cluster FILE) states another size", "dim")
    yield Text("")
    if found.nearest.memory_gib > (found.nearest.capacity_gib or math.inf):
        yield from memory_lines(layout_estimate(found, found.nearest))
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


def _time_lines(planned: Planned, by_part: Estimate) -> Iterator[Text]:
    run = planned.run
    yield from time_lines(by_part)
    if run is not None:
        yield Text.assemble(("  run", "dim"), f"  {run}")


def _runner_up_lines(found: Search, top: int) -> Iterator[Text]:
    shown = found.shortlist(top)
    yield Text("  best of each engine and degrees", "dim")
    table = plan_tables.strategies(found, shown)
    yield from table.texts(shown, lambda one: "bold" if one is shown[0] else "", indent="  ")


def _reasons(plan: Plan) -> Iterator[Text]:
    yield Text("  why", "dim")
    for reason in plan.reasons:
        yield Text(f"  - {reason}", "yellow" if "WARNING" in reason else "")


def _explained(found: Search) -> Iterator[Text]:
    """Every decision, what fixed settings cost, and what other values would."""
    yield Text("  why", "dim")
    for one in decisions(found):
        yield Text.assemble("  - ", (one.what, "bold"), f": {one.why}")
    for price in prices(found):
        yield Text(f"  - {price}")
    yield Text("  what if: the best plan with one setting changed", "dim")
    yield from plan_tables.changes(found)


def _ledger_lines(entries: Sequence[LedgerEntry]) -> Iterator[Text]:
    """What stays the same as in one fp32 process, and what does not."""
    yield Text("  compared with one process in fp32", "dim")
    for kind in KINDS:
        for entry in (one for one in entries if one.kind == kind):
            line = Text.assemble(
                (f"  {SHOWN[kind]:<17} ", _COLOURS[kind]), (entry.what, "bold")
            )
            line.append(f": {entry.why}")
            yield line
