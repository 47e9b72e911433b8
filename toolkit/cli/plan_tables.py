"""Tables of `dmt plan`: strategies, or recipes and clusters, side by side."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.cli.bars import columns
from toolkit.hardware.cluster import Cluster
from toolkit.layout import Layout, recompute_text
from toolkit.plan.explain import what_if
from toolkit.plan.plan import Plan
from toolkit.plan.search import Candidate, Search, room
from toolkit.units import seconds

_SECONDS_PER_DAY = 86400
_SECONDS_PER_HOUR = 3600


@dataclass(frozen=True)
class Run:
    """A whole run, without restarts and evaluation."""

    steps: int
    step_s: float
    """On average."""
    cluster: Cluster

    @property
    def days(self) -> float:
        """Of computing."""
        return self.steps * self.step_s / _SECONDS_PER_DAY

    @property
    def gpu_hours(self) -> float:
        """Of all accelerators."""
        return self.steps * self.step_s * self.cluster.gpus / _SECONDS_PER_HOUR

    @property
    def cost(self) -> float | None:
        """In the currency of the cluster file's price; None without one."""
        price = self.cluster.price_per_gpu_hour
        return None if price is None else price * self.gpu_hours

    def __str__(self) -> str:
        unit = "GPU" if self.cluster.gpu.memory_gib is not None else "process"
        text = f"{self.steps:,} steps: {self.duration}, {self.gpu_hours:,.3g} {unit}-hours"
        if self.gpu_hours >= 1000:
            text = f"{self.steps:,} steps: {self.duration}, {self.gpu_hours:,.0f} {unit}-hours"
        return text if self.cost is None else f"{text}, cost {self.cost:,.0f}"

    @property
    def duration(self) -> str:
        """`12.3 days`, `4.5 hours`, `36 s`."""
        total_s = self.steps * self.step_s
        if total_s >= _SECONDS_PER_DAY:
            return f"{self.days:,.1f} days"
        if total_s >= _SECONDS_PER_HOUR:
            return f"{total_s / _SECONDS_PER_HOUR:.1f} hours"
        return f"{total_s:.0f} s"

    def machine_output(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "steps": self.steps,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "cost": self.cost,
        }


def strategies(found: Search, shown: Sequence[Candidate]) -> list[list[str]]:
    """The header, and a row per layout."""
    header = ["engine/model", "dp", "tp", "pp", "vpp", "zero", "recompute", "micro"]
    experts = any(one.layout.ep > 1 for one in shown)
    header[5:5] = ["ep"] if experts else []
    rows = [[*header, "GiB", "step", "slower"]]
    best = found.best.step_s or 0.0
    for one in shown:
        layout, time = one.layout, one.step_s or 0.0
        degrees = [layout.dp, layout.tp, layout.pp, layout.vpp]
        degrees += [layout.ep] if experts else []
        slower = (
            "" if one is found.best else f"{round(time / best - 1, 3) + 0.0:+.1%}"
        )  # no -0.0%
        rows.append(
            [
                "/".join(one.pair),
                *map(str, degrees),
                f"{layout.zero_stage}{_offloaded(layout)}",
                str(layout.recompute),
                str(layout.micro_batch),
                f"{one.memory_gib:.1f}{_tight(found, one)}",
                seconds(time),
                slower,
            ]
        )
    return rows


def changes(found: Search) -> list[str]:
    """The header, and a line per change of one setting, with the planner's answer."""
    rows = [["if the recipe stated", "the plan", "GiB", "step", "slower"]]
    for one in what_if(found):
        best, value = one.best, str(one.value).lower()
        slower = (best.step_s or 0.0) / (found.best.step_s or 1.0) - 1
        timed = found.fits and best.step_s is not None
        rows.append(
            [
                f"{one.setting}={value}",
                room(best, found.cluster),
                f"{best.memory_gib:.1f}",
                "-" if best.step_s is None else seconds(best.step_s),
                f"{round(slower, 3) + 0.0:+.1%}" if timed else "-",
            ]
        )
    return columns(rows, left=2)


def _tight(found: Search, one: Candidate) -> str:
    """Marks a layout whose memory leaves no margin."""
    return " tight" if room(one, found.cluster) == "tight" else ""


def comparison(planned: Sequence[tuple[str, Search, Plan, Run | None]]) -> list[str]:
    """The header, and a line per recipe and cluster; empty columns are omitted."""
    rows = [["recipe", "cluster", "layout", "GiB", "step", "tok/s/GPU", "MFU", "run", "cost"]]
    rows += [_compared(*one) for one in planned]
    names = {row[0] for row in rows[1:]}
    dropped = {0} if len(names) == 1 else set()
    if all(row[-1] == "-" for row in rows[1:]):
        dropped.add(len(rows[0]) - 1)
    kept = [index for index in range(len(rows[0])) if index not in dropped]
    return columns([[row[index] for index in kept] for row in rows], left=3 - (0 in dropped))


def _compared(name: str, found: Search, plan: Plan, run: Run | None) -> list[str]:
    need = "-" if plan.memory_gib is None else f"{plan.memory_gib:.1f}"
    need += _tight(found, found.best) if found.fits else " too much"
    speed = plan.tokens_per_s_per_gpu
    return [
        name,
        found.cluster.name,
        " ".join(_short(plan)),
        need,
        "-" if plan.step_time_s is None else seconds(plan.step_time_s),
        "-" if speed is None else f"{speed:,.0f}",
        "-" if plan.mfu is None else f"{plan.mfu:.1%}",
        "-" if run is None else run.duration,
        "-" if run is None or run.cost is None else f"{run.cost:,.0f}",
    ]


def _short(plan: Plan) -> Iterator[str]:
    """`megatron tp8 pp16 vpp4 z1 full`."""
    layout = plan.layout
    yield plan.engine
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        if (degree := getattr(layout, name)) > 1:
            yield f"{name}{degree}"
    yield f"z{layout.zero_stage}{_offloaded(layout)}"
    if layout.recompute != "none":
        yield recompute_text(layout).replace(" ", "-")


def _offloaded(layout: Layout) -> str:
    return "" if layout.offload_optimizer == layout.offload_parameters == "none" else "+off"
