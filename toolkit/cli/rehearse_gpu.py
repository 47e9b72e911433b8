"""`dmt rehearse --gpu`: memory of ranks at their true size, without GPUs."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from toolkit.cli.output import Line, Table, output
from toolkit.cli.progress import progress
from toolkit.errors import EXIT_DONE, EXIT_FAILED
from toolkit.intake.load import load_recipe
from toolkit.plan.dimensions import layout_text
from toolkit.plan.estimate import memory_parts
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.rehearse.gpu.dress import DressRehearsal, RehearsedRank
from toolkit.run.assignment import decide
from toolkit.text.units import GIB, size

_HOLDERS = 12
"""How many holders of memory are shown."""


def dress_rehearsal(
    recipe: Path,
    overrides: Sequence[str],
    cluster: str | None,
    *,
    as_json: bool,
) -> None:
    """Rehearse and print. Exits with 4 where a rank does not fit."""
    where = None if cluster is None else find_cluster(cluster)
    planned = decide(load_recipe(recipe, overrides, where), None, where)
    rehearsal = DressRehearsal.of(planned, where)
    done = []
    scratch = tempfile.TemporaryDirectory(prefix="dmt-rehearse-")
    with progress("ranks", len(rehearsal.ranks)) as update, scratch as folder:
        for one in rehearsal.run(Path(folder)):
            done.append(one)
            update(advance=1)
    output(
        as_json,
        _machine_output(rehearsal, done),
        _lines(rehearsal, done),
        wrap=False,
        exit_code=EXIT_DONE if all(one.fits for one in done) else EXIT_FAILED,
    )


def _machine_output(rehearsal: DressRehearsal, done: Sequence[RehearsedRank]) -> dict[str, Any]:
    """The data that `--json` prints."""
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
        "ranks": [
            {
                "rank": one.rank,
                "stage": one.stage,
                "peak_gib": one.peak.nbytes / GIB,
                "planned_gib": one.planned.allocated / GIB,
                "needed_gib": one.needed_gib,
                "compiling_saves_gib": one.compiling_saves_gib,
                "fits": one.fits,
                "held_gib": {
                    kind: {place: nbytes / GIB for place, nbytes in places.items()}
                    for kind, places in one.peak.holders.items()
                },
                "planned_parts_gib": memory_parts(one.planned),
            }
            for one in done
        ],
    }


_TABLE = Table[RehearsedRank](
    {
        "rank": lambda one: str(one.rank),
        "stage": lambda one: str(one.stage),
        "peak": lambda one: size(one.peak.nbytes / GIB),
        "planned": lambda one: size(one.planned.allocated / GIB),
        "needs": lambda one: size(one.needed_gib),
        "verdict": lambda one: "fits" if one.fits else "does not fit",
    },
    left=0,
)


def _lines(rehearsal: DressRehearsal, done: Sequence[RehearsedRank]) -> Iterator[Line]:
    """A table of the ranks, and what holds the memory of the fullest one."""
    plan, full = rehearsal.assignment.plan, rehearsal.planned.plan.layout
    yield f"{rehearsal.assignment.recipe.name}: {layout_text(plan.engine, plan.model, full)}"
    run, of = rehearsal.layout.gradient_accumulation, full.gradient_accumulation
    if run < of:
        yield Text(f"  {run} of {of} micro batches were run", "dim")
    yield from _TABLE.lines(done)
    if saved := max(one.compiling_saves_gib for one in done):
        yield Text(
            "  layers were run operator after operator; compiled, or with Liger's kernels, "
            f"they hold {size(saved)} less by the plan, which `needs` leaves out",
            "dim",
        )
    fullest = max(done, key=lambda one: one.peak.nbytes)
    yield Text(f"\nrank {fullest.rank} at its fullest", "bold")
    holders = fullest.peak.holders
    for kind, places in holders.items():
        yield f"  {size(sum(places.values()) / GIB):>10}  {kind.replace('_', ' ')}"
    yield Text("\nheld by", "dim")
    largest = sorted(
        (nbytes, f"{kind}: {place or 'elsewhere'}")
        for kind, places in holders.items()
        for place, nbytes in places.items()
    )
    for nbytes, name in largest[::-1][:_HOLDERS]:
        yield f"  {size(nbytes / GIB):>10}  {name}"
