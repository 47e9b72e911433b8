"""The legality rules: which engine can train which model implementation, and how.

One table serves `dmt check` (through `problems`) and the planner (through `pairs`).
Rules about a model's shape are in `toolkit.plan.rules.models`. A setting that a rule refuses
may be left to the planner: that is the fix, where nothing better is known.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from toolkit.backend import ANY, BACKENDS, Support
from toolkit.errors import Problem
from toolkit.layout import Pair, Stage
from toolkit.plan.dimensions import DEGREES, is_above_one
from toolkit.plan.request import PlanRequest
from toolkit.recipe.schema import ClusterSection, ParallelSection
from toolkit.recipe.yaml_text import plain_text

RANKS = ("tensor", "pipeline", "context")
"""Degrees of `parallel` by which data-parallel ranks become fewer."""
_LIMITED = (*(one.setting for one in DEGREES), "replicate")
"""Degrees of which a pair has a largest one."""


class Rule(NamedTuple):
    """What a pair of engine and model, or any, cannot do. Texts are formats of the job `j`, the
    pair `p`, the stated `value` and what `refuses` returns, `why`."""

    key: str
    """The setting that is refused."""
    refuses: Callable[[Any, Any], object]
    allowed: str = "{why}"
    fix: str = "set {key} to auto"
    found: str = "{value}"


def broken(
    rules: Iterable[Rule], job: "PlanRequest | Intent", pair: Pair | None = None
) -> Iterator[Problem]:
    """The first broken rule of each setting."""
    refused = set[str]()
    for rule in rules:
        if rule.key not in refused and (why := rule.refuses(job, pair)):
            refused.add(rule.key)
            value = plain_text(attrgetter(rule.key)(job)) if "{value}" in rule.found else ""
            words = {"key": rule.key, "j": job, "p": pair, "why": why, "value": value}
            found, allowed = rule.found.format(**words), rule.allowed.format(**words)
            yield Problem(rule.key, found, allowed, rule.fix.format(**words))


class Intent(NamedTuple):
    """A recipe's `parallel` alone, in the place of a job."""

    parallel: ParallelSection


def _needs(
    key: str, other: str, lacks: Callable[[ParallelSection], object], allowed: str
) -> Rule:
    """A setting of `parallel` that goes only with some values of another one, on any pair."""
    fix = f"set {{key}} to auto, or parallel.{other}"
    found = f"{{value}} with {other.removeprefix('zero.')}: {{j.parallel.{other}}}"
    return Rule(f"parallel.{key}", lambda j, _: lacks(j.parallel), allowed, fix, found)


def _is_offloaded(place: str) -> bool:
    return place not in ("none", "auto")


NEEDS = (
    _needs(
        "virtual_pipeline",
        "pipeline",
        lambda p: is_above_one(p.virtual_pipeline) and p.pipeline == 1,
        "1 without pipeline stages",
    ),
    _needs(
        "sequence",
        "tensor",
        lambda p: p.sequence is True and p.tensor == 1,
        "true only inside a tensor-parallel group",
    ),
    _needs(
        "replicate",
        "zero.offload_parameters",
        lambda p: is_above_one(p.replicate) and _is_offloaded(p.zero.offload_parameters),
        "1 with offload, which is for models that copies of shards leave no room for",
    ),
    _needs(
        "zero.offload_optimizer",
        "zero.stage",
        lambda p: p.zero.offload_optimizer == "nvme" and p.zero.stage not in (3, "auto"),
        "nvme in stage 3 only; below it, DeepSpeed keeps the states in CPU memory silently",
    ),
    _needs(
        "zero.offload_optimizer",
        "zero.stage",
        lambda p: p.zero.offload_optimizer == "cpu" and p.zero.stage == 0,
        "none in stage 0, which shards no optimizer states",
    ),
    _needs(
        "zero.offload_parameters",
        "zero.stage",
        lambda p: _is_offloaded(p.zero.offload_parameters) and p.zero.stage not in (3, "auto"),
        "none below stage 3, which alone shards parameters",
    ),
)


def degree(stated: int | str) -> int:
    """A stated degree. The least that `auto` may become."""
    return stated if isinstance(stated, int) else 1


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


_PIPELINE_AND_ZERO = " (a pipeline still accumulates gradients, which ZeRO 2 and 3 shard)"


def pairs(parallel: ParallelSection) -> list[Pair]:
    """The pairs that support what `parallel` requests, in the order of `table`."""
    return [
        pair for pair in table() if _matches(parallel, pair) and not _violations(parallel, pair)
    ]


def chosen_from(able: Sequence[Pair], parallel: ParallelSection) -> list[Pair]:
    """Which of the pairs that can train a model the planner compares: those that `engine: auto`
    names, or all where none of these can."""
    auto = [pair for pair in able if table()[pair].auto] if parallel.engine == "auto" else []
    return auto or [*able]


def zero_stages(parallel: ParallelSection, pair: Pair) -> list[Stage]:
    """The ZeRO stages in which `pair` supports the requested offload, lowest first.

    Only the requested one if `parallel` states it. At least one if `problems` finds none.
    """

    def in_stage(stage: Stage) -> Intent:
        return Intent(parallel.with_values({"zero.stage": stage}))

    return [
        stage
        for stage in table()[pair].zero_stages
        if parallel.zero.stage in ("auto", stage) and not [*broken(NEEDS, in_stage(stage))]
    ]


def problems(parallel: ParallelSection, cluster: ClusterSection) -> list[Problem]:
    """Everything illegal about the intent.

    Keys are full dotted paths. File and line are left to the caller.
    """
    found = [*broken(NEEDS, Intent(parallel))]
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
    """The divisors of `number` that are legal degrees, ascending. 0 has none."""
    return [degree for degree in range(1, min(number, ANY) + 1) if number % degree == 0]


def _table_problems(parallel: ParallelSection) -> list[Problem]:
    """What the nearest legal pair does not support."""
    if legal := [pair for pair in table() if _matches(parallel, pair)]:
        return min((_violations(parallel, pair) for pair in legal), key=len)
    # Engine and model are both stated, but are not a legal pair.
    name, other = ("engine", "model") if parallel.model == "hf" else ("model", "engine")
    stated, kept = getattr(parallel, name), getattr(parallel, other)
    fits = ", ".join(getattr(one, name) for one in table() if getattr(one, other) == kept)
    there = f"with {other}: {kept}"
    fix = f"set parallel.{name} to auto"
    return [Problem(f"parallel.{name}", f"{stated} {there}", f"{fits} {there}", fix)]


def _world_problems(parallel: ParallelSection, cluster: ClusterSection) -> Iterator[Problem]:
    """tensor · pipeline · context must divide the number of ranks, and replicas the rest, with
    at least two ranks each."""
    degrees = {name: degree(getattr(parallel, name)) for name in RANKS}
    product, world = math.prod(degrees.values()), cluster.world_size
    if world % product:
        largest = max(degrees, key=lambda name: degrees[name])
        shown = " · ".join(f"{name} {number}" for name, number in degrees.items())
        yield Problem(
            f"parallel.{largest}",
            f"{shown} = {product} on {world} ranks",
            f"a product that divides nodes · gpus_per_node = {world}",
            f"set parallel.{largest} to auto, or use another number of ranks",
        )
        return
    sharded = world // product * degrees["context"]
    if parallel.replicate not in ("auto", *(fit := copies_of(sharded))):
        yield Problem(
            "parallel.replicate",
            f"{parallel.replicate} on {sharded} ranks",
            f"{' or '.join(map(str, fit))}: copies have equally many ranks, two or more",
            "set parallel.replicate to auto",
        )


def copies_of(ranks: int) -> list[int]:
    """Possible numbers of replicas on this many ranks, data parallel times context parallel."""
    return [1, *(ranks // shards for shards in reversed(divisors(ranks)[1:]) if shards < ranks)]


def _matches(parallel: ParallelSection, pair: Pair) -> bool:
    return parallel.engine in ("auto", pair.engine) and parallel.model in ("auto", pair.model)


def _violations(parallel: ParallelSection, pair: Pair) -> list[Problem]:
    """The settings that this pair does not support. `auto` suits every pair."""
    support, found = table()[pair], dict[str, Problem]()
    instead = "".join(
        f", or set parallel.{name} to auto"
        for name in Pair._fields
        if getattr(parallel, name) != "auto"
    )
    for key, allowed in _unsupported(parallel, support):
        name = f"parallel.{key}"
        value = plain_text(attrgetter(key)(parallel))
        fix = f"set {name} to auto{instead}"
        if key == "zero.config":
            fix = f"remove it{instead}"
        found.setdefault(name, Problem(name, value, f"{allowed} for {pair}", fix))
    return [*found.values()]


def _unsupported(parallel: ParallelSection, support: Support) -> list[tuple[str, str]]:
    """Settings that are refused, and what they may be."""
    zero, pipeline = parallel.zero, is_above_one(parallel.pipeline)
    found: list[tuple[str, str]] = []
    for name in _LIMITED:
        stated, most = getattr(parallel, name), support.largest(name)
        if stated != "auto" and stated > most:
            sharded = name == "pipeline" and zero.stage in (2, 3)
            found.append((name, f"{most}{_PIPELINE_AND_ZERO if sharded else ''}"))
    if parallel.sequence is True and not support.sequence:
        found.append(("sequence", "false"))
    if zero.stage not in ("auto", *support.zero_stages):
        stages = ", ".join(map(str, support.zero_stages))
        found.append(("zero.stage", f"{stages}{_PIPELINE_AND_ZERO if pipeline else ''}"))
    optimizer, parameters = zero.offload_optimizer, zero.offload_parameters
    places = {"optimizer": optimizer, "parameters": parameters}
    for name, place in places.items():
        able = getattr(support, f"offload_{name}")
        if place not in ("auto", *able):
            found.append((f"zero.offload_{name}", ", ".join(sorted(able))))
    if support.offload_together and not found:
        differ = "auto" not in (optimizer, parameters) and optimizer != parameters
        if differ or (optimizer == "cpu" and zero.stage not in (3, "auto")):
            both = "as zero.offload_parameters: both move, in stage 3, or none"
            found.append(("zero.offload_optimizer", both))
    recompute = parallel.recompute
    if isinstance(recompute, str) and recompute not in ("auto", *support.recompute):
        found.append(
            ("recompute", f"{', '.join(support.recompute)} (selective is megatron-core's)")
        )
    if zero.config is not None and not support.zero_config:
        found.append(("zero.config", "null"))
    return found
