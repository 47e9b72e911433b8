"""If nothing fits: searches the smallest changes with which something does."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from toolkit.backend import ANY
from toolkit.errors import PlanError
from toolkit.hardware.cluster import Cluster, usual_gpus_per_node
from toolkit.plan.explain import described
from toolkit.plan.rules import legality
from toolkit.plan.rules import models as model_rules
from toolkit.plan.rules.models import PlanRequest
from toolkit.plan.search import TIE, Candidate, Search, search

FACTORS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
"""How many times as many nodes are tried."""
_OPENED = (
    "kernels.loss",
    "kernels.compile",
    "kernels.fused",
    "kernels.experts",
    "parallel.overlap",
    "parallel.recompute",
    "training.micro_batch_size",
    "parallel.zero.stage",
    "parallel.replicate",
    "parallel.zero.offload_optimizer",
    "parallel.zero.offload_parameters",
    "parallel.sequence",
    "parallel.virtual_pipeline",
    "parallel.tensor",
    "parallel.pipeline",
    "parallel.expert",
    "parallel.model",
    "parallel.engine",
)
"""Settings that may be left open, the smaller changes first."""


@dataclass(frozen=True)
class Remedy:
    """A change with which something fits."""

    change: str
    """The change, as recipe settings."""
    best: Candidate
    """The best layout with that change."""
    cluster: Cluster

    def __str__(self) -> str:
        assert self.best.step_s is not None, "what fits is timed"
        capacity = self.cluster.gpu.memory_gib
        of = "" if capacity is None else f" of {capacity:g}"
        step_s = self.best.step_s
        step = f"{step_s:,.0f}" if step_s >= 100 else f"{step_s:.3g}"
        needs = f"{self.best.memory_gib:.1f}{of} GiB and {step} s a step"
        return f"{self.change}: {needs} with {described(self.best)}"


def over(found: Search) -> str:
    """How far the nearest layout is from fitting."""
    one, cluster = found.nearest, found.cluster
    capacity = cluster.gpu.memory_gib
    if capacity is not None and one.memory_gib > capacity:
        more = one.memory_gib - capacity
        return (
            f"the smallest layout needs {one.memory_gib:.1f} of {capacity:g} GiB per GPU, "
            f"{more:.1f} GiB too much"
        )
    if one.host_gib > cluster.host_memory_gib:
        more = one.host_gib - cluster.host_memory_gib
        return (
            f"the smallest layout needs {one.host_gib:,.0f} of {cluster.host_memory_gib:,g} "
            f"GiB of host memory per node, {more:,.0f} GiB too much"
        )
    return (
        f"the smallest layout needs {one.nvme_gib:,.0f} of {cluster.nvme_gib:,g} GiB of disk "
        "per node"
    )


def remedies(found: Search) -> list[Remedy]:
    """Every single setting set to auto, all of them, and more GPUs."""
    job, cluster = found.job, found.cluster
    single = [one for change in _settings(job) if (one := _with(job, cluster, [change]))]
    if not single and (one := _with(job, cluster, list(_settings(job)))):
        single = [one]
    return [*single, *_more_gpus(job, cluster)]


def prices(found: Search) -> Iterator[str]:
    """The cost of the recipe's fixed settings: each set to auto, if that is faster."""
    job, best = found.job, found.best
    for key, value in _settings(job):
        other = _fitting(_opened(job, key), found.cluster)
        if other is None or other.step_s is None or best.step_s is None:
            continue
        if (faster := 1 - other.step_s / best.step_s) > TIE:
            yield f"{key} is {value}: a step would be {faster:.1%} shorter with {key}: auto"


def _settings(job: PlanRequest) -> Iterator[tuple[str, Any]]:
    """What the recipe fixes and could leave open, the smaller changes first."""
    for key in _OPENED:
        without_experts = key == "parallel.expert" and not job.spec.moe_layers
        if (value := attrgetter(key)(job)) != "auto" and not without_experts:
            yield key, value


def _with(job: PlanRequest, cluster: Cluster, changes: list[tuple[str, Any]]) -> Remedy | None:
    """The result with these settings set to auto."""
    opened = job
    for key, _ in changes:
        opened = _opened(opened, key)
    found = _fitting(opened, cluster)
    if found is None:
        return None
    keys = " and ".join(key for key, _ in changes)
    return Remedy(f"set {keys} to auto", found, cluster)


def _opened(job: PlanRequest, key: str) -> PlanRequest:
    section, _, setting = key.partition(".")
    return replace(job, **{section: getattr(job, section).with_values({setting: "auto"})})


def _more_gpus(job: PlanRequest, cluster: Cluster) -> Iterator[Remedy]:
    """The smallest larger cluster on which something fits."""
    for nodes, on_node in _sizes(cluster):
        larger = replace(cluster, nodes=nodes, gpus_per_node=on_node)
        where = job.cluster.model_copy(update={"nodes": nodes, "gpus_per_node": on_node})
        if one := _fitting(replace(job, cluster=where), larger):
            count = nodes * on_node
            of = f"{nodes:,} node{'s' * (nodes > 1)} of {on_node}"
            yield Remedy(f"use {count:,} GPUs ({of})", one, larger)
            return


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


def _fitting(job: PlanRequest, cluster: Cluster) -> Candidate | None:
    """The best layout; None if the job is illegal, or nothing fits."""
    if legality.problems(job.parallel, job.cluster) or model_rules.problems(job):
        return None
    try:
        found = search(job, cluster)
    except PlanError:
        return None
    return found.best if found.fits else None
