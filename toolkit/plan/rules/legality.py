"""The legality rules: which engine can train which model implementation, and how.

One table serves `dmt check` (through `problems`), the planner (through `pairs`) and the ledger.
A layout outside the table is refused with the nearest legal one. Additional rules about a
model's shape are in `toolkit.plan.rules.models`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter

from toolkit.backend import ANY, BACKENDS, Support
from toolkit.errors import Problem
from toolkit.features.base import intent_problems
from toolkit.layout import Pair, Precision, Stage
from toolkit.plan.dimensions import DEGREES, SETTABLE, is_above_one
from toolkit.recipe.schema import ClusterSection, ParallelSection, ZeroSection

_PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "bf16")
RANKS = ("tensor", "pipeline", "context")
"""Degrees of `parallel` by which data-parallel ranks become fewer."""


@cache
def table() -> Mapping[Pair, Support]:
    """Every legal pair and what it supports: those of `engine: auto` first, transformers'
    model before megatron-core's."""
    found = {
        Pair(name, model): support
        for name in BACKENDS.names
        for model, support in BACKENDS[name].supports.items()
    }
    order = sorted(found, key=lambda pair: (not found[pair].auto, pair.model != "hf"))
    return {pair: found[pair] for pair in order}


_PIPELINE_AND_ZERO = (
    "; pipeline stages exclude ZeRO 2 and 3, which shard gradients that a pipeline "
    "still accumulates"
)


def pairs(parallel: ParallelSection, precision: Precision | None = None) -> list[Pair]:
    """The pairs that support what `parallel` requests, in the order of `table`.

    With a `precision`, only those that compute in it.
    """
    return [
        pair
        for pair, support in table().items()
        if _matches(parallel, pair)
        and not _violations(parallel, pair)
        and (precision is None or precision in support.precisions)
    ]


def chosen_from(able: Sequence[Pair], parallel: ParallelSection) -> list[Pair]:
    """Which of the pairs that can train a model the planner compares: those that `engine: auto`
    names, or all where none of these can."""
    auto = [pair for pair in able if table()[pair].auto] if parallel.engine == "auto" else []
    return auto or [*able]


def precisions(parallel: ParallelSection) -> list[Precision]:
    """The precisions of the pairs that support `parallel`, the most usual last.

    If no pair does, which `problems` reports, those of all pairs.
    """
    able = pairs(parallel) or table()
    return [name for name in _PRECISIONS if any(name in table()[p].precisions for p in able)]


def zero_stages(parallel: ParallelSection, pair: Pair) -> list[Stage]:
    """The ZeRO stages in which `pair` supports the requested offload, lowest first.

    Only the requested one if `parallel` states it; at least one if `problems` finds none.
    """

    def in_stage(stage: Stage) -> ParallelSection:
        return parallel.with_values({"zero.stage": stage})

    return [
        stage
        for stage in table()[pair].zero_stages
        if parallel.zero.stage in ("auto", stage) and not list(_needs(in_stage(stage)))
    ]


def problems(parallel: ParallelSection, cluster: ClusterSection) -> list[Problem]:
    """Everything illegal about the intent, each with the nearest legal alternative.

    Keys are full dotted paths; file and line are left to the caller.
    """
    found = [*_needs(parallel)]
    wrong = {problem.key for problem in found}
    found += [p for p in _table_problems(parallel) if p.key not in wrong]
    return found or list(_world_problems(parallel, cluster))


def data_parallel(parallel: ParallelSection, cluster: ClusterSection) -> int | None:
    """Data-parallel degree, if the recipe fixes it: world / (tensor·pipeline·context).

    An `auto` counts as 1 if no pair that supports the rest has more. None while the planner
    still has a choice, or when the degrees do not divide the world.
    """
    able = pairs(parallel)
    product = 1
    for name in RANKS:
        degree = getattr(parallel, name)
        if degree != "auto":
            product *= degree
        elif not able or any(table()[pair].largest(name) > 1 for pair in able):
            return None
    dp, rest = divmod(cluster.world_size, product)
    return None if rest else dp


def divisors(number: int) -> list[int]:
    """The divisors of `number` that are legal degrees, ascending; none of 0."""
    return [degree for degree in range(1, min(number, ANY) + 1) if number % degree == 0]


def nearest(wanted: int, fit: Iterable[int]) -> int | None:
    """The nearest of `fit`, the smaller of two; None of nothing."""
    return min(fit, key=lambda degree: (abs(degree - wanted), degree), default=None)


def _needs(parallel: ParallelSection) -> Iterator[Problem]:
    """Settings that make sense only together with another one."""
    for dimension in SETTABLE:
        for need in dimension.needs:
            value = _value(parallel, dimension.key)
            if need.values(value) and not need.allowed_if(
                other := _value(parallel, need.other)
            ):
                name = need.other.removeprefix("parallel.zero.")
                shown = f"{str(value).lower()} with {name}: {other}"
                yield Problem(dimension.key, shown, need.allowed, need.fix)
    yield from intent_problems(parallel)


def _value(parallel: ParallelSection, key: str) -> object:
    """What a recipe states for a setting of `parallel`."""
    return attrgetter(key.removeprefix("parallel."))(parallel)


def _table_problems(parallel: ParallelSection) -> list[Problem]:
    """What the nearest legal pair does not support."""
    legal = [pair for pair in table() if _matches(parallel, pair)]
    if not legal:
        return [_illegal_pair(parallel)]
    return min((_violations(parallel, pair) for pair in legal), key=len)


def _illegal_pair(parallel: ParallelSection) -> Problem:
    """Engine and model are both stated, but are not a legal pair."""
    asked = (parallel.engine, parallel.model)
    near = [pair for pair in table() if (pair[0] == asked[0]) != (pair[1] == asked[1])]
    best = min(near, key=lambda pair: pair.model != "hf")
    kept = 0 if best[0] == asked[0] else 1
    name, other = Pair._fields[1 - kept], Pair._fields[kept]
    fits = ", ".join(pair[1 - kept] for pair in near if pair[kept] == asked[kept])
    return Problem(
        f"parallel.{name}",
        f"{asked[1 - kept]} with {other}: {asked[kept]}",
        f"{fits} with {other}: {asked[kept]}",
        f"set parallel.{name} to {best[1 - kept]}",
    )


def _world_problems(parallel: ParallelSection, cluster: ClusterSection) -> Iterator[Problem]:
    """tensor · pipeline · context must divide the number of ranks."""
    stated = {name: getattr(parallel, name) for name in RANKS}
    degrees = {name: 1 if degree == "auto" else degree for name, degree in stated.items()}
    if degrees["context"] == 1:
        del degrees["context"]
    product, world = math.prod(degrees.values()), cluster.world_size
    if world % product == 0:
        sharded = world // product * degrees.get("context", 1)
        yield from _copies(parallel, sharded)
        yield from intent_problems(parallel, ranks=sharded)
        return
    largest = max(degrees, key=lambda name: degrees[name])
    shown = " · ".join(f"{name} {degree}" for name, degree in degrees.items())
    near = _nearest_degrees(degrees, world)
    changes = [f"parallel.{n} to {near[n]}" for n in degrees if near[n] != degrees[n]]
    fix = f"set {' and '.join(changes)}"
    if product % cluster.gpus_per_node == 0:
        fix += f", or use {product // cluster.gpus_per_node:,} nodes"
    yield Problem(
        f"parallel.{largest}",
        f"{shown} = {product} on {world} ranks",
        f"a product that divides nodes · gpus_per_node = {world}",
        fix,
    )


def _copies(parallel: ParallelSection, ranks: int) -> Iterator[Problem]:
    """Replicas divide the data-parallel ranks, with at least two ranks each."""
    wanted = parallel.replicate
    if not isinstance(wanted, int) or wanted == 1 or wanted in (fit := copies_of(ranks)):
        return
    yield Problem(
        "parallel.replicate",
        f"{wanted} on {ranks} ranks",
        f"{' or '.join(map(str, fit))}: copies have equally many ranks, two or more",
        f"set parallel.replicate to {nearest(wanted, fit)}",
    )


def copies_of(ranks: int) -> list[int]:
    """Possible numbers of replicas on this many ranks, data parallel times context parallel."""
    return [1, *(ranks // shards for shards in reversed(divisors(ranks)[1:]) if shards < ranks)]


def _nearest_degrees(degrees: Mapping[str, int], world: int) -> dict[str, int]:
    """The nearest degrees whose product divides `world`.

    The largest is changed first: the others are fixed before it, smallest first, and change
    only if they do not divide the remaining ranks.
    """
    near, room = {}, world
    for name in sorted(degrees, key=lambda name: degrees[name]):
        near[name] = nearest(degrees[name], divisors(room)) or 1
        room //= near[name]
    return near


def _matches(parallel: ParallelSection, pair: Pair) -> bool:
    return parallel.engine in ("auto", pair.engine) and parallel.model in ("auto", pair.model)


def _violations(parallel: ParallelSection, pair: Pair) -> list[Problem]:
    """The settings that this pair does not support; `auto` suits every pair."""
    support, zero = table()[pair], parallel.zero
    found: list[Problem] = []

    def refuse(key: str, value: object, allowed: str, instead: str, why: str = "") -> None:
        found.append(
            Problem(f"parallel.{key}", str(value), f"{allowed} for {pair}{why}", instead)
        )

    for name in (*(one.setting for one in DEGREES if one.key), "replicate"):
        degree, most = getattr(parallel, name), support.largest(name)
        if parallel.model == "auto":
            most = support.largest(name)
        if degree != "auto" and degree > most:
            exclusive = name == "pipeline" and zero.stage in (2, 3)
            why = _PIPELINE_AND_ZERO if exclusive else ""
            instead = f"set parallel.{name} to {most}{_or_pair(parallel, name, degree)}"
            refuse(name, degree, str(most), instead, why)
    if parallel.sequence is True and not support.sequence:
        refuse("sequence", "true", "false", "set parallel.sequence to auto")
    if parallel.overlap == "none" and not support.without_overlap:
        able = " or ".join(p.engine for p, one in table().items() if one.without_overlap)
        instead = f"set parallel.overlap to auto, or parallel.engine to {able}"
        refuse("overlap", "none", "auto", instead, ", which overlaps what it can")
    or_engine = or_zero(parallel, pair)
    if zero.stage != "auto" and zero.stage not in support.zero_stages:
        stages = ", ".join(map(str, support.zero_stages))
        why = _PIPELINE_AND_ZERO if is_above_one(parallel.pipeline) else ""
        instead = f"set parallel.zero.stage to auto{or_engine}"
        refuse("zero.stage", zero.stage, stages, instead, why)
    for name in ("offload_optimizer", "offload_parameters"):
        place, places = getattr(zero, name), getattr(support, name)
        if place != "auto" and place not in places:
            near = "cpu" if "cpu" in places else "none"
            fix = f"set parallel.zero.{name} to {near}{or_engine}"
            refuse(f"zero.{name}", place, ", ".join(sorted(places)), fix)
    if support.offload_together and not found and (problem := _apart(zero, pair, or_engine)):
        found.append(problem)
    recompute = parallel.recompute
    if isinstance(recompute, str) and recompute not in ("auto", *support.recompute):
        ways = ", ".join(support.recompute)
        why = ": selective is megatron-core's, and the model here is transformers'"
        refuse("recompute", recompute, ways, "set parallel.recompute to full (or auto)", why)
    found += intent_problems(parallel, pair)
    if zero.config is not None and not support.zero_config:
        refuse("zero.config", zero.config, "null", f"remove it{or_engine}")
    if zero.extra and not support.zero_config:
        refuse("zero.extra", ", ".join(zero.extra), "null", f"remove it{or_engine}")
    return found


def _apart(zero: ZeroSection, pair: Pair, or_engine: str) -> Problem | None:
    """An offload that keeps optimizer states and parameters apart, or would have to."""
    optimizer, parameters = zero.offload_optimizer, zero.offload_parameters
    if optimizer == "cpu" and zero.stage not in (3, "auto"):
        return Problem(
            "parallel.zero.offload_optimizer",
            f"cpu with stage: {zero.stage}",
            f"none below stage 3 for {pair}, which moves optimizer and parameters together",
            f"set parallel.zero.stage to 3 (or auto){or_engine}",
        )
    if "auto" in (optimizer, parameters) or optimizer == parameters:
        return None
    alone, other = "optimizer", "parameters"
    if optimizer == "none":
        alone, other = other, alone
    return Problem(
        f"parallel.zero.offload_{alone}",
        f"cpu with offload_{other}: none",
        f"both cpu or both none for {pair}, which moves optimizer and parameters together",
        f"set parallel.zero.offload_{other} to cpu{or_engine}",
    )


def _or_pair(parallel: ParallelSection, name: str, degree: int) -> str:
    """The alternative fix for a degree that is too large: a pair that supports it, if any."""
    if name == "pipeline" and parallel.zero.stage in (2, 3):
        return ", or parallel.zero.stage to 1"
    asked = (parallel.engine, parallel.model)
    able = [p for p in table() if table()[p].largest(name) >= degree]
    if not able:
        return ""
    other = min(
        able, key=lambda p: sum(a not in ("auto", b) for a, b in zip(asked, p, strict=True))
    )
    changes = [
        f"parallel.{field} to {value}"
        for field, value, stated in zip(Pair._fields, other, asked, strict=True)
        if stated not in ("auto", value)
    ]
    return f", or {' and '.join(changes)}" if changes else ""


def or_zero(parallel: ParallelSection, pair: Pair) -> str:
    """DeepSpeed as the alternative fix, if the pair is not its and the degrees allow it."""
    if table()[pair].zero_config:
        return ""
    degrees = (parallel.pipeline, parallel.virtual_pipeline, parallel.expert)
    engines = [pair.engine for pair, support in table().items() if support.zero_config]
    if not engines or any(map(is_above_one, degrees)):
        return ""
    return f", or set parallel.engine to {engines[0]}"
