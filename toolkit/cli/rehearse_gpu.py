"""`dmt rehearse --gpu`: ranks at their true size, without GPUs."""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from toolkit.cli.bars import bars, count_progress
from toolkit.cli.output import Line, output
from toolkit.errors import EXIT_DONE, EXIT_FAILED, Problem, RecipeError
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.plan.dimensions import layout_text
from toolkit.plan.estimate import memory_parts
from toolkit.rehearse.gpu.dress import DressRehearsal, RehearsedRank
from toolkit.rehearse.gpu.findings import HOST_WAITS, STEP
from toolkit.run.assignment import decide
from toolkit.text.units import GIB, byte_size, seconds, size

OnGpus = Annotated[
    bool,
    typer.Option(
        "--gpu",
        help="Instead, run the recipe's own layout at its true size on GPUs that are not "
        "there: memory, collectives, waits and FLOPs of its ranks.",
    ),
]
RanksOfGpus = Annotated[
    str | None,
    typer.Option(
        metavar="N,N", help="With --gpu: these; default: the first of each pipeline stage."
    ),
]

_HOLDERS = 12
"""Holders of memory in the table."""
_COMPUTING = 6
"""Modules with most FLOPs in the table."""


def dress_rehearsal(
    recipe: Path,
    overrides: Sequence[str],
    ranks: str | None,
    cluster: str | None,
    layouts: Sequence[str],
    as_json: bool,
    *,
    gpu: bool,
) -> None:
    """Rehearse and print. Exits with 4 where something is wrong."""
    for name, value in (("--ranks", ranks), ("--cluster", cluster)):
        if value is not None and not gpu:
            raise RecipeError([Problem(name, repr(value), "only with --gpu", "add --gpu")])
    if layouts:
        allowed = "without --gpu: there, the recipe's own layout is run"
        raise RecipeError(
            [Problem("--layouts", ", ".join(layouts), allowed, "use --set parallel.…")]
        )
    where = None if cluster is None else find_cluster(cluster)
    planned = decide(load_recipe(recipe, overrides, where), None, where)
    rehearsal = DressRehearsal.of(planned, _numbers(ranks), where)
    done = rehearsed(rehearsal)
    good = all(one.fits and not one.wrong for one in done)
    output(
        as_json,
        machine_output(rehearsal, done),
        _lines(rehearsal, done),
        wrap=False,
        exit_code=EXIT_DONE if good else EXIT_FAILED,
    )


def rehearsed(rehearsal: DressRehearsal) -> list[RehearsedRank]:
    """Run the ranks, with a bar on standard error where that is a terminal."""
    found = []
    shown = [*map(str, rehearsal.ranks), "done"]
    scratch = tempfile.TemporaryDirectory(prefix="dmt-rehearse-")
    with count_progress(len(rehearsal.ranks), "rank ") as update, scratch as folder:
        update(description=shown[0])
        for count, one in enumerate(rehearsal.run(Path(folder)), 1):
            found.append(one)
            update(completed=count, description=shown[count])
    return found


def _numbers(text: str | None) -> list[int]:
    """`0,7` as numbers."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        allowed = "numbers of ranks, as in 0,7"
        raise RecipeError([Problem("--ranks", repr(text), allowed)]) from error


# For programs


def machine_output(rehearsal: DressRehearsal, done: Sequence[RehearsedRank]) -> dict[str, Any]:
    """What `--json` prints; `collectives` and `flops` are those of the micro batches run."""
    plan, full = rehearsal.assignment.plan, rehearsal.planned.plan.layout
    return {
        "recipe": rehearsal.assignment.recipe.name,
        "engine": plan.engine,
        "model": plan.model,
        "layout": full.to_dict(),
        "micro_batches": {
            "run": rehearsal.layout.gradient_accumulation,
            "of": full.gradient_accumulation,
        },
        "ranks": [_rank_output(one) for one in done],
    }


def _rank_output(one: RehearsedRank) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "stage": one.stage,
        "peak_gib": one.peak.nbytes / GIB,
        "planned_gib": one.planned.allocated / GIB,
        "peaks_gib": {phase: peak.nbytes / GIB for phase, peak in one.found.peaks.items()},
        "reserved_gib": one.found.reserved / GIB,
        "needed_gib": one.needed_gib,
        "compiling_saves_gib": one.compiling_saves_gib,
        "fits": one.fits,
        "held_gib": {
            kind: {place: nbytes / GIB for place, nbytes in places.items()}
            for kind, places in one.peak.holders.items()
        },
        "planned_parts_gib": memory_parts(one.planned),
        "flops": sum(one.found.flops.values()),
        "planned_flops": one.planned_flops,
        "flops_by_module": one.found.flops,
        "collectives": [
            {"name": name, "group": group, "ranks": ranks, "count": count, "bytes": nbytes}
            for (name, group, ranks), (count, nbytes) in _collectives(one).items()
        ],
        "communicators": len(one.found.communicators),
        "planned_communicators": one.planned_communicators,
        "host_waits": [
            {"how": how, "where": where, "count": count}
            for (how, where), count in _waits(one).items()
        ],
        "save": None
        if (saved := one.found.saved) is None
        else {
            "bytes": saved.nbytes,
            "bytes_from_gpu": saved.from_gpu,
            "tensors": saved.tensors,
            "copy_s": one.save_s,
            "host_gib_per_node": one.saved_gib_per_node,
        },
        "wrong": [asdict(finding) for finding in one.wrong],
    }


def _collectives(one: RehearsedRank) -> dict[tuple[str, str, int], tuple[int, int]]:
    """Of the step: how many and their bytes, by name, group and its size; the most first."""
    found: dict[tuple[str, str, int], tuple[int, int]] = {}
    for each in one.found.collectives:
        if each.phase == STEP:
            key = each.name, each.group, each.size
            count, nbytes = found.get(key, (0, 0))
            found[key] = count + 1, nbytes + each.nbytes
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def _waits(one: RehearsedRank) -> Counter[tuple[str, str]]:
    """Of the step: how often the host waits, by how and place."""
    found = one.found.of(HOST_WAITS, STEP)
    return Counter((each.how, each.where[0] if each.where else "") for each in found)


# For people


def _lines(rehearsal: DressRehearsal, done: Sequence[RehearsedRank]) -> Iterator[Line]:
    """A table of the ranks, and what the fullest one does."""
    plan, full = rehearsal.assignment.plan, rehearsal.planned.plan.layout
    yield f"{rehearsal.assignment.recipe.name}: {layout_text(plan.engine, plan.model, full)}"
    run, of = rehearsal.layout.gradient_accumulation, full.gradient_accumulation
    if run < of:
        yield Text(f"  {run} of {of} micro batches were run", "dim")
    yield _table(done)
    for note in _of_compiled(done):
        yield Text(f"  {note}", "dim")
    fullest = max(done, key=lambda one: one.peak.nbytes)
    yield Text(f"\nrank {fullest.rank} at its fullest", "bold")
    held = {kind: sum(places.values()) / GIB for kind, places in fullest.peak.holders.items()}
    yield from bars(held, fullest.peak.nbytes / GIB, "GiB")
    for title, lines in _details(fullest):
        yield Text(f"\n{title}", "dim")
        yield from (f"  {line}" for line in lines)
    for one in done:
        for wrong in dict.fromkeys(
            f"{f.what}: {f.how}: {''.join(f.where[:1])}" for f in one.wrong
        ):
            yield Text(f"rank {one.rank}: {wrong}", "bold red")


def _details(one: RehearsedRank) -> Iterator[tuple[str, list[str]]]:
    """By title: what holds memory, computes, is sent, waits and is saved on a rank."""
    yield "held by", _largest(one)
    total, flops = sum(one.found.flops.values()), [*one.found.flops.items()][:_COMPUTING]
    yield (
        "most FLOPs",
        [f"{count / total:>6.0%}  {module or 'elsewhere'}" for module, count in flops],
    )
    yield (
        "collectives of a step",
        [
            f"{count:>6,} × {name}  {byte_size(nbytes)}  {group}"
            for (name, group, _), (count, nbytes) in _collectives(one).items()
        ],
    )
    waits = _waits(one).items()
    yield (
        "the host waits for the GPU",
        [f"{count:>6,} × {how}: {where}" for (how, where), count in waits],
    )
    if saved := _saved(one):
        yield "one save", [saved]


def _of_compiled(done: Sequence[RehearsedRank]) -> Iterator[str]:
    """What `needs` has of layers that a GPU would run compiled."""
    if any(one.compiling_saves_gib for one in done):
        saved = max(one.compiling_saves_gib for one in done)
        yield (
            "layers were run operator after operator; compiled, or with Liger's kernels, they "
            f"hold {size(saved)} less by the plan, which `needs` leaves out"
        )


def _table(done: Sequence[RehearsedRank]) -> Table:
    found = Table(box=None, pad_edge=False, header_style="dim")
    memory = "peak", "planned", "reserved", "needs"
    for name in ("rank", "stage", *memory, "PFLOP", "planned", "verdict"):
        found.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True)
    for one in done:
        gib = one.peak.nbytes / GIB, one.planned.allocated / GIB, one.found.reserved / GIB
        flops = sum(one.found.flops.values()), one.planned_flops
        found.add_row(
            str(one.rank),
            str(one.stage),
            *map(size, (*gib, one.needed_gib)),
            *(f"{count / 1e15:.3f}" for count in flops),
            "wrong" if one.wrong else "fits" if one.fits else "does not fit",
        )
    return found


def _saved(one: RehearsedRank) -> str:
    """What a checkpoint makes this rank copy."""
    saved, time_s, node_gib = one.found.saved, one.save_s, one.saved_gib_per_node
    if saved is None or time_s is None or node_gib is None:
        return ""
    text = (
        f"{size(saved.nbytes / GIB)} of {saved.tensors:,} tensors to host memory, "
        f"{size(node_gib)} per node"
    )
    return f"{text}; from the GPU in {seconds(time_s)}" if saved.from_gpu else text


def _largest(one: RehearsedRank) -> list[str]:
    held = [
        (nbytes, f"{kind}: {place or 'elsewhere'}")
        for kind, places in one.peak.holders.items()
        for place, nbytes in places.items()
    ]
    return [
        f"{size(nbytes / GIB):>10}  {name}" for nbytes, name in sorted(held)[::-1][:_HOLDERS]
    ]
