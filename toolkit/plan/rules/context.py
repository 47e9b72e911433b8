"""Context parallel: which exchange its ranks use, and which recipes it cannot train."""

from collections.abc import Iterator
from math import gcd, lcm

from toolkit.errors import Problem
from toolkit.layout import Exchange, Layout, Pair
from toolkit.models.config_keys import is_attention_dropout
from toolkit.models.families import settings_of
from toolkit.models.families.common import frequencies_limit
from toolkit.plan.request import PlanRequest
from toolkit.recipe.schema import ParallelSection, Recipe

LONG = 16_384
"""Tokens of a row from which `parallel.context: auto` may be above 1 without need: of shorter
ones attention is a small part, and data parallel sends less."""

SPLIT_IS_KEPT: tuple[str, ...] = (
    "afmoe", "arcee", "aria_text", "axk1", "beam", "bert", "bert-generation", "biogpt",
    "bitnet", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "diffllama", "dots1",
    "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite", "granitemoe",
    "internlm3", "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna", "llama",
    "longcat_flash", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "nanochat", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "roc_bert", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2", "vaultgemma", "youtu",
)  # fmt: skip
"""Model types of transformers that compute the same with rows in parts, as
`tests.models.every_context` found. Others may have a state along the row, count positions
themselves, or attend in a way of their own; the comparison of a small batch, when an engine is
built, is too coarse in 16 bits to trust it alone."""
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def exchanges(job: PlanRequest, parallel: ParallelSection) -> tuple[Exchange, ...]:
    """The recipe's value, or all that `auto` may become with settled degrees."""
    degree = _number(parallel.context)
    if job.kernels.context != "auto":
        return (job.kernels.context,)
    if degree == 1:
        return (Layout.exchange,)
    heads = max(1, job.spec.heads // _number(parallel.tensor))
    return ("all_gather",) if heads % degree else ("all_gather", "ulysses")


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


def problems(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """Why a pair cannot spread the positions of this recipe's rows over so many ranks."""
    asked = job.parallel
    if not isinstance(asked.context, int) or asked.context == 1:
        return
    yield from _lengths(job, asked.context)
    dropped = [key for key, rate in job.config.items() if rate and is_attention_dropout(key)]
    if dropped:
        yield _refused(
            asked.context, f"1 with attention dropout (model.config.{dropped[0]})", "1"
        )
    if pair.model == "hf" and (why := _no_parts(job)):
        yield _refused(asked.context, f"1 with {why}", "1")
    heads = job.spec.heads // gcd(job.spec.heads, _number(asked.tensor))
    if job.kernels.context == "ulysses" and heads % asked.context:
        near = gcd(heads, asked.context)
        allowed = (
            f"a divisor of the {heads} attention heads of a rank with kernels.context: ulysses"
        )
        yield _refused(asked.context, allowed, str(near), ", or kernels.context to auto")


def _no_parts(job: PlanRequest) -> str:
    """Of transformers' model, what needs more than attention to see whole rows."""
    settings = settings_of(job.config)
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
    """What divides every length: the positions of a rank are two equal runs, which sequence
    parallel splits over `tensor` ranks."""
    return lcm(2 * context, context * tensor)


def _lengths(job: PlanRequest, context: int) -> Iterator[Problem]:
    sequence = job.parallel.sequence is True
    step = unit(context, _number(job.parallel.tensor) if sequence else 1)
    if (length := job.training.sequence_length) % step == 0:
        return
    near = " or ".join(str(n * step) for n in (length // step, length // step + 1) if n)
    yield Problem(
        "parallel.context",
        f"{context} with sequences of {length} tokens",
        f"a degree for lengths that {step} divides: each rank computes two equal runs",
        f"set training.sequence_length to {near}, or parallel.context to 1",
    )


def _refused(degree: int, allowed: str, near: str, otherwise: str = "") -> Problem:
    fix = f"set parallel.context to {near}{otherwise}"
    return Problem("parallel.context", str(degree), allowed, fix)


def _number(degree: int | str) -> int:
    return degree if isinstance(degree, int) else 1
