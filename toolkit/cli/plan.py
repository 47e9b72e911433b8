"""`dmt plan`: how a recipe would be laid out, without starting anything."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from toolkit.cli.check import human
from toolkit.cli.options import Overrides, RecipePath
from toolkit.engines.setup import render_engine_config
from toolkit.hardware.catalogue import Gpu, gpu
from toolkit.models.families import model_spec
from toolkit.plan.ledger import KINDS, Entry, Kind, ledger
from toolkit.plan.planner import Plan, model_config
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import ClusterSection, Recipe
from toolkit.train.assignment import decide

_DEGREES = {
    "tensor": "tp",
    "pipeline": "pp",
    "virtual pipeline": "vpp",
    "context": "cp",
    "expert": "ep",
}
"""Degrees of parallelism that are shown when they are not 1, and their layout fields."""
_MIB_PER_GIB = 1024
_COLOURS: dict[Kind, str] = {"exact": "green", "approximated": "yellow", "refused": "dim"}


def plan(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print machine output alone on standard output.")
    ] = False,
) -> None:
    """Say how a recipe would be laid out, and why; starts and writes nothing.

    Example: `dmt plan recipes/gpt2/gpt2-124m-pretrain.yaml --set cluster.nodes=4`
    """
    decided = decide(load_recipe(recipe, overrides), None)
    device, entries = gpu(decided.recipe.cluster.gpu), ledger_of(decided.recipe, decided.plan)
    if as_json:
        typer.echo(json.dumps(machine_output(decided.plan, device, entries)))
    else:
        _print(decided.recipe, decided.plan, device)
        _print_ledger(entries)


def ledger_of(recipe: Recipe, plan: Plan) -> list[Entry]:
    """What this plan keeps exactly, approximates and refuses."""
    config = model_config(recipe.model)
    told = render_engine_config(recipe, plan)
    return ledger(recipe, plan, model_spec(config), config, told)


def machine_output(plan: Plan, device: Gpu, entries: Sequence[Entry]) -> dict[str, Any]:
    """The plan as `--json` prints it; null is what this release does not predict.

    Plans are made by rules, not by search: one is considered and none rejected.
    """
    states, capacity = plan.model_states_gib, device.memory_gib
    # Activations are not predicted: only too large model states decide alone.
    too_large = capacity is not None and states > capacity
    entry = {
        "engine": plan.engine,
        "model": plan.model,
        "layout": asdict(plan.layout),
        "memory_gib": {
            "model_states": states,
            "activations": None,
            "other": None,
            "total": None,
        },
        "step_time_s": None,
        "tokens_per_s_per_gpu": None,
        "mfu": None,
        "fits": False if too_large else None,
        "parameters": plan.parameters,
        "reasons": list(plan.reasons),
        "ledger": [asdict(entry) for entry in entries],
    }
    return {"plans": [entry], "considered": 1, "rejected": {}}


def _print(recipe: Recipe, plan: Plan, device: Gpu) -> None:
    """A small table of what was decided, then why."""
    console = Console(highlight=False)
    title = Text.assemble((recipe.name, "bold"), f"  {human(plan.parameters)} parameters")
    console.print(title, soft_wrap=True)
    for label, value in _rows(plan, recipe.cluster, device):
        console.print(Text.assemble((f"  {label:<16}", "dim"), value), soft_wrap=True)
    console.print("\n  why", style="dim")
    for reason in plan.reasons:
        style = "yellow" if "WARNING" in reason else ""
        console.print(Text(f"  - {reason}", style), soft_wrap=True)


def _print_ledger(entries: Sequence[Entry]) -> None:
    """What stays the same as in one fp32 process, and what does not."""
    console = Console(highlight=False)
    console.print("\n  ledger, against one fp32 process", style="dim")
    for kind in KINDS:
        for entry in (one for one in entries if one.kind == kind):
            line = Text.assemble((f"  {kind:<13} ", _COLOURS[kind]), (entry.what, "bold"))
            line.append(f": {entry.why}")
            console.print(line, soft_wrap=True)


def _rows(plan: Plan, cluster: ClusterSection, device: Gpu) -> Iterator[tuple[str, str]]:
    layout = plan.layout
    machines = "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"
    yield "engine", plan.engine
    yield "model", plan.model
    yield "ranks", f"{layout.world:,} = {machines} × {cluster.gpus_per_node} {device.name}"
    yield "data parallel", f"{layout.dp:,}"
    for label, field in _DEGREES.items():
        if (degree := getattr(layout, field)) != 1:
            yield label, str(degree)
    if layout.sequence_parallel:
        yield "sequence", "split inside the tensor group"
    shards = plan.engine == "megatron" and layout.zero_stage == 1
    yield "ZeRO stage", f"{layout.zero_stage}{' (distributed optimizer)' * shards}"
    yield "offload", _offload(plan)
    yield (
        "global batch",
        f"{layout.micro_batch} micro batch × {layout.gradient_accumulation} accumulation × "
        f"{layout.dp:,} dp = {layout.global_batch:,} sequences",
    )
    yield "recompute", layout.recompute
    of = "per process" if device.memory_gib is None else f"of {device.memory_gib:g} GiB per GPU"
    yield "model states", f"{_memory(plan.model_states_gib)} {of}"


def _memory(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * _MIB_PER_GIB:.1f} MiB"


def _offload(plan: Plan) -> str:
    """What leaves the device, and where it goes."""
    places = {
        "optimizer": plan.layout.offload_optimizer,
        "parameters": plan.layout.offload_parameters,
    }
    away = [f"{what} to {place}" for what, place in places.items() if place != "none"]
    return ", ".join(away) or "none"
