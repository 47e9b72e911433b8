"""Goodput at scale: the model, published figures, a simulation and its approximations.

    python benchmarks/goodput.py [--write docs/goodput.md]

Prints Markdown tables, or writes them between their markers in a document. Nothing is run but
a simulation with a fixed seed. Takes a few seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import document  # next to this script
from goodput_simulation import first_order_goodput, simulated_shares

from toolkit.extras.goodput.failures import (
    SECONDS_PER_HOUR,
    Failures,
    best_interval_s,
    daly_interval_s,
    expected_shares,
    young_interval_s,
)
from toolkit.extras.goodput.saving import Assumptions, PlannedRun, failures, rows
from toolkit.hardware.cluster import default_cluster
from toolkit.intake.load import load_recipe
from toolkit.plan.planner import plan_recipe
from toolkit.text.units import duration

RECIPES = Path(__file__).parents[1] / "recipes"
MINUTE = 60.0
LLAMA_3_HOURS = 54 * 24 * 16_384 / 419
"""GPU-hours per unexpected interruption: 419 in 54 days on 16,384 GPUs."""
RSC_1_HOURS = 24 * 8 / 6.50e-3
"""GPU-hours per failure: 6.50 in a thousand node-days, of 8 GPUs each."""
SIMULATED_FAILURES = 20_000


@dataclass(frozen=True)
class Figure:
    """What somebody published, and what the model says of it."""

    what: str
    published: str
    predicted: str
    source: str


def llama_405b() -> PlannedRun:
    """Llama 3.1 405B as its recipe says, on 16,384 H100."""
    recipe = load_recipe(RECIPES / "llama/llama-3.1-405b-pretrain.yaml")
    where, plan = recipe.cluster, plan_recipe(recipe)
    cluster = default_cluster(where.nodes, where.gpus_per_node, where.gpu)
    return PlannedRun(plan.parameters, cluster, plan.step_time_s)


def mttf_hours(gpu_hours: float, gpus: int) -> float:
    """Mean time between failures of a job, as `dmt plan --mtbf` reckons it."""
    return failures(llama_405b(), gpus, Assumptions(gpu_hours)).mtbf_s / SECONDS_PER_HOUR


def best_goodput(gpu_hours: float, gpus: int) -> float:
    """Of 405B at the best interval, with the default assumptions."""
    there = failures(llama_405b(), gpus, Assumptions(gpu_hours))
    return expected_shares(there, best_interval_s(there)).goodput


FT_HSDP = Failures(mtbf_s=18 * MINUTE, stall_s=0.6, commit_s=0.0, restart_s=10 * MINUTE)
"""Fully synchronous training on about 100,000 GPUs."""
DALY = {24 * 60: 117.0, 6 * 60: 57.0, 15: 9.1}
"""His best intervals by mean time between failures, for dumps of 5 minutes; all in minutes."""


def published() -> Iterator[Figure]:
    """Every published figure that says enough to be compared."""
    llama, rsc = "Llama 3, arXiv:2407.21783, 3.3.4", "Kokolis et al., arXiv:2410.21680"
    yield Figure(
        "effective training time, 405B on 16,384 H100, 419 interruptions in 54 days", "> 90%",
        f"{best_goodput(LLAMA_3_HOURS, 16_384):.1%}", llama,
    )  # fmt: skip
    yield Figure(
        "effective training time, three months on 9,600 GPUs (with Llama 3's rate of failures)",
        "97%", f"{best_goodput(LLAMA_3_HOURS, 9600):.1%}", "ByteRobust, arXiv:2509.16293",
    )  # fmt: skip
    yield Figure(
        "effective training time, about 100,000 GPUs, a failure every 18 minutes, 10 minutes "
        "of recovery", "44%",
        f"{expected_shares(FT_HSDP, best_interval_s(FT_HSDP)).goodput:.1%}",
        "FT-HSDP, arXiv:2602.00277",
    )  # fmt: skip
    for gpus, said in {16_384: "1.8 h, projected", 131_072: "0.23 h, projected"}.items():
        found = f"{mttf_hours(RSC_1_HOURS, gpus):.2f} h"
        yield Figure(f"time between failures of {gpus:,} A100", said, found, rsc)
    found = f"{mttf_hours(RSC_1_HOURS, 1024):.1f} h"
    yield Figure("time between failures of 1,024 A100", "7.9 h, measured", found, rsc)
    for minutes, best in DALY.items():
        job = Failures(minutes * MINUTE, 5 * MINUTE, 0, 10 * MINUTE)
        what = f"best interval, a failure in {duration(job.mtbf_s)}, saves of 5 minutes"
        found = f"{daly_interval_s(job) / MINUTE:.3g} min"
        yield Figure(what, f"{best:g} min", found, "Daly 2006, figures 3 to 5")


def published_table() -> Iterator[str]:
    """One line per figure."""
    yield "| | published | this model | source |"
    yield "|---|---|---|---|"
    for one in published():
        yield f"| {one.what} | {one.published} | {one.predicted} | {one.source} |"


def scale_table() -> Iterator[str]:
    """405B from 8 to 100,000 GPUs with Llama 3's rate of failures."""
    yield "| GPUs | job MTBF | save every | goodput | saving | replay | restart | if sync |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in rows(llama_405b(), Assumptions(LLAMA_3_HOURS)):
        shares = one.shares
        lost = (shares.saving, shares.replay, shares.restart, one.synchronous_goodput)
        cells = [f"{one.gpus:,}", duration(one.job.mtbf_s), duration(one.interval_s)]
        cells += [f"**{shares.goodput:.1%}**", *(f"{share:.1%}" for share in lost)]
        yield f"| {' | '.join(cells)} |"


CHECKED = tuple(
    Failures(minutes * MINUTE, stall_s, commit_s, 5 * MINUTE)
    for minutes, stall_s, commit_s in (
        (24 * 60, 10, 30), (24 * 60, 300, 0), (180, 2, 30), (180, 60, 0), (60, 10, 120),
        (30, 1, 5), (30, 120, 0), (15, 300, 0), (5, 300, 0),
    )
)  # fmt: skip
"""From rare failures and cheap saves to ones that leave hardly any time."""


def simulation_table() -> Iterator[str]:
    """The closed form, the simulation, and the first-order reckoning."""
    yield (
        "| MTBF | stall | committed after | Young's √(2δM) | Daly's interval | interval / MTBF "
        "| goodput, closed form | simulated | first order |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for job in CHECKED:
        interval = best_interval_s(job)
        counted = simulated_shares(job, interval, SIMULATED_FAILURES).goodput
        cells = [
            duration(job.mtbf_s),
            f"{job.stall_s:g} s",
            f"{job.commit_s:g} s",
            duration(young_interval_s(job)),
            duration(interval),
            f"{interval / job.mtbf_s:.3f}",
            f"{expected_shares(job, interval).goodput:.1%}",
            f"{counted:.1%}",
            f"{first_order_goodput(job, interval):.1%}",
        ]
        yield f"| {' | '.join(cells)} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "published": published_table,
    "scale": scale_table,
    "simulation": simulation_table,
}


updated = partial(document.updated, tables=TABLES)

if __name__ == "__main__":
    document.main(__doc__.splitlines()[0] if __doc__ else "", TABLES)
