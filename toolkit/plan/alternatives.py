"""What a recipe with other settings would get: the planner's answer to it.

One question serves both uses: each setting with another value (`dmt plan --explain`), and lists
of changes with which something fits where nothing does.
"""

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

from toolkit.backend import ANY, BACKENDS
from toolkit.errors import PlanError
from toolkit.layout import Layout
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.plan.dimensions import DIMENSIONS, Dimension, layout_text
from toolkit.plan.estimate import Estimate
from toolkit.plan.hardware.cluster import Cluster, usual_gpus_per_node
from toolkit.plan.plan import Remedy
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import legality
from toolkit.plan.rules import models as model_rules
from toolkit.plan.search import Search, search
from toolkit.recipe.schema import AdapterSection

FACTORS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
"""How many times as many nodes are tried."""
OPEN = (
    *(one.key for one in reversed(DIMENSIONS) if one.field != "stages"),
    "parallel.model",
    "parallel.engine",
)
"""Settings that may be left to the planner, the smaller changes first."""
_WITHIN = {"vpp": "pp", "sequence_parallel": "tp", "exchange": "cp"}
"""Fields of a layout that say something only where another one is above 1."""
NVME = "/path/of/a/local/disk"
ADAPTER = {"rank": 16, "alpha": 32}
"""A usual size of LoRA (arXiv:2106.09685)."""
SHORTEST = 1024
"""Sequences shorter than this are not proposed."""

Changes = dict[str, Any]
"""Values by dotted setting."""


class Alternative(NamedTuple):
    """What the planner chooses for the recipe with changes."""

    changes: Changes
    best: Estimate

    @property
    def options(self) -> str:
        """Options of `dmt plan` and `dmt launch`."""
        return " ".join(f"--set {_word(key, value)}" for key, value in self.changes.items())


def what_if(found: Search) -> Iterator[Alternative]:
    """For each setting left to the planner its other values, of numbers the nearest lower and
    higher. For each stated one `auto`, where that changes the layout."""
    job, best = found.job, found.best
    yield from other_engines(found, {best.pair.engine})
    for dimension in DIMENSIONS:
        if dimension.of(job) == "auto":
            for value in _others(found, dimension):
                yield from _alternative(job, found.cluster, {dimension.key: value})
    for key, _ in _stated(job):
        for one in _alternative(job, found.cluster, {key: "auto"}):
            if (one.best.pair, one.best.layout) != (best.pair, best.layout):
                yield one


def other_engines(found: Search, but: Collection[str]) -> Iterator[Alternative]:
    """The best plan of each engine except some, if the recipe leaves the engine open."""
    for name in BACKENDS.names if found.job.parallel.engine == "auto" else ():
        if name not in but:
            yield from _alternative(found.job, found.cluster, {"parallel.engine": name})


def _others(found: Search, dimension: Dimension) -> list[Any]:
    """Other values of a setting that the search tried, and that of a plain layout."""
    field, layout = dimension.field, found.best.layout
    chosen, values = getattr(layout, field), {getattr(Layout(), field)}
    if getattr(layout, _WITHIN.get(field, "dp")) == 1 and field in _WITHIN:
        return []
    for partial in found.partial:
        match field:
            case "micro_batch":
                values.update(partial.micro_batches)
            case "recompute":
                values.update(way for way, _ in partial.recomputes if isinstance(way, str))
            case "loss":
                values.update(loss for _, loss in partial.recomputes)
            case _:
                values.add(getattr(partial.layout, field))
    ordered = sorted(values - {chosen})
    if not isinstance(chosen, int) or field == "recompute":
        return ordered
    lower = [one for one in ordered if one < chosen]
    return [*lower[-1:], *ordered[len(lower) :][:1]]


def _alternative(
    job: PlanRequest, cluster: Cluster, changes: Changes, *, fitting: bool = False
) -> Iterator[Alternative]:
    """The answer with these changes. None if they are refused, if there is no layout, or, with
    `fitting`, if nothing fits with them."""
    stated, changed = dict(changes), job
    if adapter := stated.pop("adapter", None):
        changed = replace(job, adapter=AdapterSection(**adapter), freeze=())
    place = {key: value for key, value in stated.items() if key.startswith("cluster.")}
    if place:
        sizes = {key.partition(".")[2]: value for key, value in place.items()}
        cluster = replace(cluster, **sizes)
    changed = changed.stating(stated)
    if legality.problems(changed.parallel, changed.cluster) or model_rules.problems(changed):
        return
    with suppress(PlanError):
        found = search(changed, cluster)
        if found.fits or not fitting:
            yield Alternative(changes, found.best)


def over(found: Search) -> str:
    """How far the nearest layout is from fitting."""
    short = next(one for one in found.nearest.resources() if one.needed > one.capacity)
    return (
        f"the smallest layout needs {short.needed:,.1f} of {short.capacity:,g} GiB "
        f"{short.where}, {short.needed - short.capacity:,.1f} GiB too much"
    )


def remedies(found: Search) -> list[Remedy]:
    """What would fit, from what costs least: a setting of the recipe's own, speed, the
    optimizer, context, the weights that train, more GPUs."""
    job, cluster = found.job, found.cluster
    fixed = dict(_stated(job))
    own = [_first(job, cluster, [(f"{key}: {fixed[key]}", {key: "auto"})]) for key in fixed]
    anything: Changes = dict.fromkeys(fixed, "auto")
    if not any(own):
        own = [_first(job, cluster, [("your layout", anything)])]
    opened = ({},) if any(own) else ({}, anything)
    others = (_first(job, cluster, tries, opened) for tries in _sacrifices(job))
    more = [
        (f"{nodes * on_node:,} GPUs are needed", _size(nodes, on_node))
        for nodes, on_node in _sizes(cluster)
    ]
    return [one for one in (*own, *others, _first(job, cluster, more)) if one is not None]


def _sacrifices(job: PlanRequest) -> Iterator[list[tuple[str, Changes]]]:
    """What a run may do without, the dearest last. Of each list, the first that fits counts."""
    if job.parallel.zero.nvme_path is None:
        yield [("speed: states on NVMe", {"parallel.zero.nvme_path": NVME})]
    for name, kind in OPTIMIZERS.items() if job.adapter is None else ():
        if kind.gives_up and job.optimizer.kind.whole is None:
            yield [(kind.gives_up, {"optimizer.name": name})]
    length, shorter = job.training.sequence_length, []
    while length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        shorter.append((f"sequences of {2 * length:,}", {"training.sequence_length": length}))
    yield shorter
    if job.has_weights and job.adapter is None and job.kernels.fp8 is None:
        yield [("training all weights: LoRA", {"adapter": ADAPTER})]


def _first(
    job: PlanRequest,
    cluster: Cluster,
    tries: list[tuple[str, Changes]],
    opened: tuple[Changes, ...] = ({},),
) -> Remedy | None:
    """The first that fits, after one of the changes `opened`: none, or, where no setting of the
    recipe is to blame alone, all that it fixes left to `auto`."""
    for gives_up, changes in tries:
        for before in opened:
            for one in _alternative(job, cluster, {**before, **changes}, fitting=True):
                text = layout_text(*one.best.pair, one.best.layout)
                sizes = one.best.memory_gib, one.best.host_gib, one.best.step_s
                return Remedy(gives_up, one.options, *sizes, text)
    return None


def _stated(job: PlanRequest) -> Iterator[tuple[str, Any]]:
    """Settings that the recipe fixes and could leave open, the smaller changes first."""
    for key in OPEN:
        without_experts = key == "parallel.expert" and not job.spec.moe_layers
        if (value := attrgetter(key)(job)) != "auto" and not without_experts:
            yield key, value


def _word(key: str, value: Any) -> str:
    """`key=value` for a shell."""
    if isinstance(value, dict):
        return f"'{key}={{{', '.join(f'{name}: {one}' for name, one in value.items())}}}'"
    if isinstance(value, tuple):
        return f"'{key}=[{', '.join(map(str, value))}]'"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _size(nodes: int, on_node: int) -> Changes:
    return {"cluster.nodes": nodes, "cluster.gpus_per_node": on_node}


def _sizes(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Larger clusters: first a whole node, then more of them."""
    usual = usual_gpus_per_node(cluster.gpu.like or cluster.gpu.name)
    on_node = cluster.gpus_per_node
    while cluster.nodes == 1 and on_node * 2 <= usual:
        on_node *= 2
        yield 1, on_node
    for factor in FACTORS:
        nodes = cluster.nodes * factor
        if nodes == int(nodes) and nodes * on_node <= ANY:
            yield int(nodes), on_node
