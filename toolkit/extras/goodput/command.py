"""`dmt plan --mtbf`: how often to save, and what failures cost."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.text import Text

from toolkit.cli.output import Table
from toolkit.errors import PlanError
from toolkit.extras.goodput.saving import (
    BARRIER_S,
    DEFAULT_GBPS,
    DEFAULT_RESTART_MIN,
    Assumptions,
    GoodputRow,
    PlannedRun,
    goodput_as_written,
    rows,
)
from toolkit.plan.checkpoint_size import BYTES_PER_PARAMETER
from toolkit.plan.planned import Planned
from toolkit.text.units import duration


class GoodputOption:
    """What `--mtbf` adds to the plan of one recipe on one cluster."""

    def __init__(
        self, mtbf: float | None, gbps: float | None, restart_minutes: float | None
    ) -> None:
        """Raises PlanError for a value out of bounds, and for others without `mtbf`."""
        if mtbf is None:
            raise PlanError(
                "--checkpoint-gbps and --restart-minutes: nothing is asked about failures",
                fix="add --mtbf HOURS, the mean time between failures of one GPU",
            )
        gbps = DEFAULT_GBPS if gbps is None else gbps
        restart = DEFAULT_RESTART_MIN if restart_minutes is None else restart_minutes
        self.assumed = Assumptions(
            _within("--mtbf", mtbf, 1e-3, 1e9),
            _within("--checkpoint-gbps", gbps, 1e-3, 1e6),
            _within("--restart-minutes", restart, 0.0, 1e5),
        )

    def machine_output(self, planned: Planned) -> dict[str, Any]:
        """The `goodput` object of `--json`."""
        job, assumed = _run_of(planned), self.assumed
        return {
            "assumptions": asdict(assumed),
            "checkpoint_bytes": job.checkpoint_bytes,
            "recipe": {
                "gpus": job.cluster.gpus,
                "every_steps": job.every_steps,
                "goodput": goodput_as_written(job, assumed),
            },
            "jobs": [row.machine_output() for row in rows(job, assumed)],
        }

    def lines(self, planned: Planned) -> Iterator[Text]:
        """The table, the recipe's own setting, and all that is assumed."""
        job, assumed = _run_of(planned), self.assumed
        yield Text("  failures: how often to save, and what is left for training", "dim")
        found = [*rows(job, assumed)]
        own = next(row for row in found if row.gpus == job.cluster.gpus)
        yield from TABLE.texts(found, lambda row: "bold" if row is own else "", indent="  ")
        yield Text("")
        yield from _advice(job, assumed, own)
        yield Text("  assumed", "dim")
        for text in _assumed(job, assumed):
            yield Text(f"  - {text}")


def _run_of(planned: Planned) -> PlannedRun:
    """What has to be saved, how often and where."""
    recipe, plan, run = planned.recipe, planned.plan, planned.run
    step_s = plan.step_time_s if run is None else run.step_s
    # Checkpoints of adapters do not hold what is frozen.
    frozen = 0 if recipe.adapter is not None else plan.frozen_parameters
    parameters = plan.parameters - plan.frozen_parameters + frozen
    steps, every = recipe.total_steps(), recipe.checkpoint.every_steps
    return PlannedRun(parameters, planned.cluster, step_s, steps, every, frozen)


def _within(option: str, value: float, low: float, high: float) -> float:
    """`value`. Raises PlanError outside of the bounds, and for NaN."""
    if not low <= value <= high:
        raise PlanError(
            f"{option} is {value:g}; it is a number from {low:g} to {high:,.0f}",
            fix=f"write it in the unit that `dmt plan --help` names for {option}",
        )
    return value


TABLE = Table[GoodputRow](
    {
        "GPUs": lambda row: f"{row.gpus:,}",
        "job MTBF": lambda row: duration(row.job.mtbf_s),
        "save every": lambda row: duration(row.interval_s),
        "steps": lambda row: "-" if row.interval_steps is None else f"{row.interval_steps:,}",
        "goodput": lambda row: f"{row.shares.goodput:.1%}",
        "saving": lambda row: f"{row.shares.saving:.1%}",
        "replay": lambda row: f"{row.shares.replay:.1%}",
        "restart": lambda row: f"{row.shares.restart:.1%}",
        "if sync": lambda row: f"{row.synchronous_goodput:.1%}",
    },
    left=0,
    gap=" ",
)
"""A line per number of GPUs; 80 columns wide at most."""


def _advice(job: PlannedRun, assumed: Assumptions, best: GoodputRow) -> Iterator[Text]:
    """The recipe's setting, and the best one on its cluster."""
    if best.interval_steps is None or job.step_s is None:
        return
    own = f"  this recipe on {job.cluster.gpus:,}: "
    if job.steps is not None and job.steps <= best.interval_steps:
        whole = duration(job.steps * job.step_s)
        yield Text(f"{own}the whole run ({whole}) is shorter than the best interval")
        return
    written = goodput_as_written(job, assumed)
    if job.every_steps is None or written is None:
        now = "checkpoint.every_steps is not set, so a failure undoes everything"
    else:
        span = duration(job.every_steps * job.step_s)
        now = f"checkpoint.every_steps is {job.every_steps:,} ({span}): goodput {written:.1%}"
    proposal = f"--set checkpoint.every_steps={best.interval_steps}"
    yield Text(f"{own}{now}; {best.shares.goodput:.1%} with {proposal}")


def _assumed(job: PlannedRun, assumed: Assumptions) -> Iterator[str]:
    """All assumptions behind the numbers."""
    taken = job.checkpoint_bytes
    checkpoint = f"{taken / 1e9:,.0f} GB" if taken >= 1e10 else f"{taken / 1e6:,.0f} MB"
    yield (
        f"--mtbf {assumed.mtbf_hours:,g}: hours between failures of one GPU with its share of "
        "host, network, power and software; any failure stops the whole job "
        "(Llama 3: 50,700)"
    )
    yield (
        f"a checkpoint is {checkpoint}: {BYTES_PER_PARAMETER} bytes per parameter, fp32 "
        "weights and both Adam moments"
    )
    yield (
        f"--checkpoint-gbps {assumed.checkpoint_gbps:g}: GB/s that each node writes and reads, "
        "all at once, however many there are"
    )
    yield (
        f"--restart-minutes {assumed.restart_minutes:g}: from a failure until the ranks load "
        "the checkpoint"
    )
    yield (
        f"saves are asynchronous: training stops for {BARRIER_S:g} s and the copy to host "
        "memory, and a save counts once it is written; `if sync`: it stops until then"
    )
    yield (
        f"other sizes than {job.cluster.gpus:,}: the same model state spread evenly over that "
        f"many GPUs, {job.cluster.gpus_per_node} to a node; whether the model fits and trains "
        "well there is not asked, and its step time is not known"
    )
