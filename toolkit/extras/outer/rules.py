"""What the outer loop requires of a recipe, what it costs, and a replica's recipe."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.errors import Problem
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.wire import BLOCK, address
from toolkit.intake.checks import broken_rules
from toolkit.models.spec import ModelSpec
from toolkit.objectives.dpo import REFERENCE
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.text.terminal import tell
from toolkit.text.units import byte_size, seconds

_KEY = "parallel.outer"


def problems(recipe: Recipe) -> Iterator[Problem]:
    """What disagrees with it."""
    outer = recipe.parallel.outer  # type: ignore[attr-defined]
    found = [*_own(outer), *_batch(recipe, outer), *_saving(recipe, outer), *_unable(recipe)]
    yield from found
    if not found and outer.batch == "all":
        yield from broken_rules(of_replica(recipe, outer))


def _own(outer: OuterSection) -> Iterator[Problem]:
    if outer.replica is not None and outer.replica >= outer.replicas:
        allowed = f"0 to {outer.replicas - 1}"
        yield Problem(f"{_KEY}.replica", str(outer.replica), allowed, "number them from 0")
    unused = {
        "learning_rate": outer.optimizer == "average",
        "momentum": outer.optimizer == "average",
        "staleness": outer.overlap != "delayed",
    }
    for name, is_unused in unused.items():
        if is_unused and (value := getattr(outer, name)) is not None:
            other = "overlap: none" if name == "staleness" else "optimizer: average"
            yield Problem(f"{_KEY}.{name}", f"{value:g}", f"null with {other}", "remove it")
    if outer.holder is not None:
        try:
            address(outer.holder)
        except ValueError:
            fix = f"set {_KEY}.holder to e.g. 10.0.0.1:29400"
            yield Problem(f"{_KEY}.holder", outer.holder, "HOST:PORT", fix)
    elif outer.replica is not None:
        fix = f"set {_KEY}.holder to HOST:PORT of replica 0's machine"
        yield Problem(f"{_KEY}.holder", "null", f"HOST:PORT with {_KEY}.replica", fix)


def _batch(recipe: Recipe, outer: OuterSection) -> Iterator[Problem]:
    batch, key = recipe.training.global_batch_size, "training.global_batch_size"
    if outer.batch == "all" and batch % outer.replicas:
        below, above = (batch // outer.replicas + n for n in (0, 1))
        nearest = " or ".join(str(n * outer.replicas) for n in (below, above) if n)
        allowed = f"a multiple of {outer.replicas}, the replicas of parallel.outer"
        yield Problem(key, str(batch), allowed, f"set {key} to {nearest}")


def _saving(recipe: Recipe, outer: OuterSection) -> Iterator[Problem]:
    steps, key = recipe.checkpoint.every_steps, "checkpoint.every_steps"
    if steps is not None and steps % outer.every_steps:
        nearest = -(-steps // outer.every_steps) * outer.every_steps
        allowed = f"null or a multiple of {outer.every_steps}, {_KEY}.every_steps"
        yield Problem(key, str(steps), allowed, f"set {key} to {nearest}")
    if recipe.checkpoint.keep < 2:
        allowed = f"at least 2 with {_KEY}, whose replicas do not save at the same instant"
        yield Problem("checkpoint.keep", "1", allowed, "set checkpoint.keep to 2 or more")


def _unable(recipe: Recipe) -> Iterator[Problem]:
    """Settings whose meaning depends on all samples, or on one run's validation losses."""
    zero, data, training = recipe.parallel.zero, recipe.data, recipe.training
    stops = any(source.at_end == "stop" for source in data.sources)
    stated = {
        "training.epochs": training.epochs and "steps or tokens",
        "training.batch_ramp": training.batch_ramp and "null",
        "data.stages": data.stages and "none",
        "data.train": stops and "no source with at_end: stop",
        "schedule.name": recipe.schedule.name == "plateau" and "another schedule",
        "evaluation.early_stopping": recipe.evaluation.early_stopping and "null",
        "training.objective": REFERENCE in recipe.objective().reads
        and "an objective without a reference model",
        "parallel.zero.offload_optimizer": zero.offload_optimizer == "nvme" and "none or cpu",
        "parallel.zero.offload_parameters": zero.offload_parameters == "nvme" and "none or cpu",
    }
    for key, allowed in stated.items():
        if allowed:
            found, fix = f"set, with {_KEY}", f"remove it, or {_KEY}"
            yield Problem(key, found, f"{allowed} with {_KEY}", fix)


def of_replica(recipe: Recipe, outer: OuterSection) -> Recipe:
    """The recipe of one replica: its part of each batch, the same steps, and validation on as
    many samples as the whole run has."""
    if outer.batch == "each":
        return recipe
    batch = recipe.training.global_batch_size
    return recipe.with_values(
        {
            "training.global_batch_size": batch // outer.replicas,
            "training.steps": recipe.total_steps(),
            "training.tokens": None,
            "evaluation.batches": recipe.evaluation.batches * outer.replicas,
            f"{_KEY}.batch": "each",
        }
    )


def rehearsed(_outer: OuterSection) -> None:
    """A rehearsal is of one replica."""
    tell(f"{_KEY} is left out of the rehearsal: its layouts are those of one replica")


def ledger(
    outer: OuterSection, _plan: Plan, _spec: ModelSpec, _config: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """It is another algorithm, except with one step and the mean of SGD's weights."""
    replicas, steps = outer.replicas, outer.every_steps
    yield "exact", "samples of replicas", f"each trains 1/{replicas} of every global batch"
    how: str = outer.optimizer
    if how != "average":
        how += ", learning rate {:g}, momentum {:g}".format(*outer.factors)
    why = (
        f"another algorithm than one large batch: {replicas} replicas train {steps} steps each "
        f"and their weights are merged ({how}); equal only with every_steps: 1, optimizer: "
        "average, SGD without clipping as optimizer"
    )
    yield "approximated", "outer loop", why
    if outer.overlap == "delayed":
        why = "changes are applied as they arrive, to weights that others have changed since"
        yield "approximated", "delayed exchange", f"{why}; repeated runs differ"
    if outer.compress == "int8":
        why = f"changes of weights are sent in 8 bits, with a scale per {BLOCK} elements"
        yield "approximated", "compressed changes", why


def reasons(outer: OuterSection, spec: ModelSpec) -> Iterator[str]:
    """Predicted bytes and time of the exchanges, in words.

    The holder is at replica 0's site; every other replica sends its change there and gets the
    weights in fp32, over the one link of that site. Synchronous data parallel over the same
    sites: a ring sends 2 (R-1) times the gradients in fp32 in every step, in 2 (R-1) messages
    one after the other, each of 1/R of them.

    The holder has them, the outer momentum, and a change of every replica; asynchronously also
    the sum of the gradients that arrived, and the copies that replicas are sent. A replica has
    the weights that its round began with, those at its end, and their change; asynchronously
    also the change that is on its way.
    """
    parameters = spec.trainable or spec.total
    others, link = outer.replicas - 1, outer.link
    up, down = (others * size * parameters for size in (_sent_bytes(outer), 4.0))
    rate, latency_s = link.gigabits_per_s * 1e9 / 8, link.latency_ms / 1e3
    round_s = (up + down) / rate + 2 * latency_s
    ring = 2 * others * 4.0 * parameters
    ring_s = ring / outer.replicas / rate + 2 * others * latency_s
    steps = outer.every_steps
    meanwhile = " while the next round trains" if outer.overlap == "delayed" else ""
    yield (
        f"outer loop: {byte_size(int((up + down) / steps))} per step between sites, "
        f"{seconds(round_s)} per {steps} steps at {link.gigabits_per_s:g} "
        f"Gbit/s{meanwhile}; synchronous: {byte_size(int(ring))} and {seconds(ring_s)} per step"
    )
    delayed = outer.overlap == "delayed"
    momentum = outer.factors[1] > 0
    held = 1 + momentum + outer.replicas + delayed * (momentum + outer.replicas)
    size = byte_size(int(4.0 * parameters))
    yield (
        f"outer loop: the weights in fp32, {size}, are about {held} times in the memory of the "
        f"holder's host, and {3 + delayed} times in that of rank 0 of each replica"
    )


def _sent_bytes(outer: OuterSection) -> float:
    """Bytes per parameter that a replica sends."""
    return 4.0 if outer.compress == "none" else 1.0 + 4.0 / BLOCK
