"""If nothing fits: the changes with which something does, by what the user gives up."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any

from toolkit.backend import ANY
from toolkit.features.base import excluding
from toolkit.hardware.cluster import Cluster, usual_gpus_per_node
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.plan.dimensions import SETTABLE
from toolkit.plan.explain import answer, described
from toolkit.plan.plan import Remedy
from toolkit.plan.request import PlanRequest
from toolkit.plan.search import ON_DISKS, TIE, Candidate, Search, shortage
from toolkit.recipe.schema import AdapterSection, OptimizerSection

FACTORS = (1.25, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
"""How many times as many nodes are tried."""
_DISRUPTION: Mapping[str, int] = {
    "parallel.overlap": 4,
    "parallel.model": 16,
    "parallel.engine": 17,
    **{one.key: one.disruption for one in SETTABLE if one.disruption is not None},
}
"""Settings that may be left open; see `Dimension.disruption`."""
NVME = "/path/of/a/local/disk"
ADAPTER = {"rank": 16, "alpha": 32}
"""A usual size of LoRA (arXiv:2106.09685)."""
SHORTEST = 1024
"""Sequences shorter than this are not proposed."""

Changes = dict[str, Any]


def over(found: Search) -> str:
    """How far the nearest layout is from fitting."""
    short = shortage(found.nearest, found.cluster)
    assert short is not None, "only where nothing fits"
    needs = f"the smallest layout needs {short.needed} of {short.capacity} GiB {short.where}"
    return needs if short.on == ON_DISKS else f"{needs}, {short.missing} GiB too much"


def remedies(found: Search) -> list[Remedy]:
    """What would fit, from what costs least: a setting of the recipe's own, speed, the
    optimizer, context, the weights that train, more GPUs."""
    job, cluster = found.job, found.cluster
    fixed = dict(_settings(job))
    settings = [
        one
        for key, value in fixed.items()
        if (one := _with(job, cluster, f"{key}: {value}", {key: "auto"}))
    ]
    anything = dict.fromkeys(fixed, "auto")
    if not settings and (one := _with(job, cluster, "your layout", anything)):
        settings = [one]
    opened = ({},) if settings else ({}, anything)
    others = (_first(job, cluster, tries, opened) for tries in _sacrifices(job))
    return [*settings, *(one for one in others if one), *_more_gpus(job, cluster)]


def _sacrifices(job: PlanRequest) -> Iterator[list[tuple[str, Changes]]]:
    """What a run may do without, the dearest last; of each list the first that fits counts."""
    on_host: Changes = {"parallel.offload_activations": True}
    if job.parallel.recompute in ("none", "selective"):
        on_host["parallel.recompute"] = "full"
    tiled: Changes = {"kernels.mlp": "tiled"}
    yield [
        ("speed: layer inputs on the host", on_host),
        ("speed: tiled MLP", tiled),
        ("speed: host inputs and tiled MLP", {**on_host, **tiled}),
    ]
    if job.parallel.zero.nvme_path is None:
        yield [("speed: states on NVMe", {"parallel.zero.nvme_path": NVME})]
    for name, kind in OPTIMIZERS.items() if job.adapter is None else ():
        if kind.gives_up and job.optimizer.kind.whole is None:
            fields = OptimizerSection.model_fields
            unused = {f"optimizer.{key}": fields[key].default for key in kind.unused}
            given = {key: new for key, new in unused.items() if attrgetter(key)(job) != new}
            yield [(kind.gives_up, {"optimizer.name": name, **given})]
    length, shorter = job.training.sequence_length, []
    while length % 2 == 0 and length // 2 >= SHORTEST:
        length //= 2
        shorter.append((f"sequences of {2 * length:,}", {"training.sequence_length": length}))
    yield shorter
    if job.has_weights and job.adapter is None and not excluding("adapter", job.features):
        yield [("training all weights: LoRA", {"adapter": ADAPTER})]


def _first(
    job: PlanRequest,
    cluster: Cluster,
    tries: list[tuple[str, Changes]],
    opened: tuple[Changes, ...],
) -> Remedy | None:
    """The first that fits, after one of the changes `opened`: none, or, where no setting of the
    recipe is to blame alone, all that it fixes left to `auto`."""
    for gives_up, changes in tries:
        for before in opened:
            if one := _with(job, cluster, gives_up, {**before, **changes}):
                return one
    return None


def prices(found: Search) -> Iterator[str]:
    """The cost of the recipe's fixed settings: each set to auto, if that is faster."""
    job, best = found.job, found.best
    for key, value in _settings(job):
        other = _fitting(_changed(job, {key: "auto"}), found.cluster)
        if other is None or other.step_s is None or best.step_s is None:
            continue
        if (faster := 1 - other.step_s / best.step_s) > TIE:
            yield f"{key} is {value}: a step would be {faster:.1%} shorter with {key}: auto"


def _settings(job: PlanRequest) -> Iterator[tuple[str, Any]]:
    """What the recipe fixes and could leave open, the smaller changes first."""
    for key in sorted(_DISRUPTION, key=_DISRUPTION.__getitem__):
        without_experts = key == "parallel.expert" and not job.spec.moe_layers
        if (value := attrgetter(key)(job)) != "auto" and not without_experts:
            yield key, value


def _with(job: PlanRequest, cluster: Cluster, gives_up: str, changes: Changes) -> Remedy | None:
    """The result with other settings, if something fits with them."""
    best = _fitting(_changed(job, changes), cluster)
    options = " ".join(f"--set {_word(key, value)}" for key, value in changes.items())
    return None if best is None else _remedy(gives_up, options, best)


def _remedy(gives_up: str, options: str, best: Candidate) -> Remedy:
    assert best.step_s is not None, "what fits is timed"
    memory, host = best.memory_gib, best.host_gib
    return Remedy(gives_up, options, memory, host, best.step_s, described(best))


def _word(key: str, value: Any) -> str:
    """`key=value` for a shell."""
    if isinstance(value, dict):
        return f"'{key}={{{', '.join(f'{name}: {one}' for name, one in value.items())}}}'"
    if isinstance(value, tuple):
        return f"'{key}=[{', '.join(map(str, value))}]'"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _changed(job: PlanRequest, changes: Changes) -> PlanRequest:
    """The request with other settings."""
    stated = dict(changes)
    if adapter := stated.pop("adapter", None):
        job = replace(job, adapter=AdapterSection(**adapter), freeze=())
    return job.stating(stated)


def _more_gpus(job: PlanRequest, cluster: Cluster) -> Iterator[Remedy]:
    """The smallest larger cluster on which something fits."""
    for nodes, on_node in _sizes(cluster):
        larger = replace(cluster, nodes=nodes, gpus_per_node=on_node)
        where = job.cluster.model_copy(update={"nodes": nodes, "gpus_per_node": on_node})
        if best := _fitting(replace(job, cluster=where), larger):
            options = f"--set cluster.nodes={nodes} --set cluster.gpus_per_node={on_node}"
            yield _remedy(f"{nodes * on_node:,} GPUs are needed", options, best)
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
    """The best layout; None if the request is refused, or nothing fits."""
    found = answer(job, cluster)
    return found.best if found and found.fits else None
