"""Context parallel: which exchange its ranks use, and which recipes it cannot train."""

from collections.abc import Iterator
from math import gcd, lcm

from toolkit.errors import Problem
from toolkit.layout import Exchange, Layout, Pair
from toolkit.models.families.arguments import frequencies_limit
from toolkit.models.model import is_attention_dropout, read
from toolkit.models.types import SPLIT_IS_KEPT
from toolkit.plan.dimensions import is_above_one
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.legality import Rule, broken, degree
from toolkit.recipe.schema import ParallelSection, Recipe

LONG = 16_384
"""Tokens of a row from which `parallel.context: auto` may be above 1 without need: of shorter
ones attention is a small part, and data parallel sends less."""

FP8_BLOCK = 16
"""Tokens that GPUs multiply at once in 8 bits."""
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def exchanges(job: PlanRequest, parallel: ParallelSection) -> tuple[Exchange, ...]:
    """The recipe's value, or all that `auto` may become with settled degrees."""
    ranks = degree(parallel.context)
    if job.kernels.context != "auto":
        return (job.kernels.context,)
    if ranks == 1:
        return (Layout.exchange,)
    heads = max(1, job.spec.heads // degree(parallel.tensor))
    return ("all_gather",) if heads % ranks else ("all_gather", "ulysses")


def unused(recipe: Recipe) -> Iterator[Problem]:
    """An exchange without ranks between which it could take place."""
    if recipe.parallel.context == 1 and is_used(recipe.kernels.context):
        yield Problem(
            "kernels.context",
            f"{recipe.kernels.context} with parallel.context: 1",
            "auto without context parallel",
            "set kernels.context to auto, or parallel.context to 2 or more",
        )


def is_used(exchange: str) -> bool:
    """Whether a recipe that states it has context parallel."""
    return exchange not in ("auto", Layout.exchange)


def _no_parts(job: PlanRequest) -> str:
    """Of transformers' model, what needs more than attention to see whole rows."""
    settings = read(job.config).config
    if job.spec.family not in SPLIT_IS_KEPT:
        return f"model type {job.spec.family}, which no test has trained with rows in parts"
    kinds = set(settings["layer_types"] or ()) - _ATTENTION
    if kinds:
        return f"layers of kind {min(kinds)}, which compute along whole rows"
    limit = frequencies_limit(settings)
    if limit is not None and job.training.sequence_length > limit:
        return f"more than {limit} tokens, from where frequencies depend on a rank's positions"
    return ""


def unit(context: int, tensor: int = 1) -> int:
    """The number that must divide every length. A rank has two equal runs of positions, which
    sequence parallel splits over `tensor` ranks."""
    return lcm(2 * context, context * tensor)


def _length(job: PlanRequest, _: Pair) -> str:
    sequence = job.parallel.sequence is True
    context = degree(job.parallel.context)
    step = unit(context, degree(job.parallel.tensor) if sequence else 1)
    if job.kernels.fp8 is not None:
        step = lcm(step, FP8_BLOCK * context)
    if job.training.sequence_length % step == 0:
        return ""
    return f"lengths that {step} divides: each rank computes two equal runs"


def _dropout(job: PlanRequest, _: Pair) -> str:
    rates = (key for key, rate in job.config.items() if rate and is_attention_dropout(key))
    return next(rates, "")


def _heads(job: PlanRequest) -> int:
    """Attention heads of a rank."""
    return job.spec.heads // gcd(job.spec.heads, degree(job.parallel.tensor))


RULES = (
    Rule(
        "parallel.context",
        _length,
        found="{value} with sequences of {j.training.sequence_length} tokens",
        fix="set parallel.context to auto, or training.sequence_length to such a length",
    ),
    Rule("parallel.context", _dropout, "1 with attention dropout (model.config.{why})"),
    Rule(
        "parallel.context",
        lambda j, p: p.model == "hf" and _no_parts(j),
        "1 with {why}",
    ),
    Rule(
        "parallel.context",
        lambda j, _: (
            j.kernels.context == "ulysses"
            and _heads(j) % degree(j.parallel.context)
            and _heads(j)
        ),
        "a divisor of the {why} attention heads of a rank with kernels.context: ulysses",
    ),
)
"""What keeps a pair from spreading the positions of this recipe's rows over so many ranks."""


def problems(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """See `RULES`."""
    if is_above_one(job.parallel.context):
        yield from broken(RULES, job, pair)
