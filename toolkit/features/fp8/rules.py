"""What products in 8 bits need and cost, and what they round."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import PlanError, Problem
from toolkit.features.fp8 import Fp8Section
from toolkit.hardware.catalogue import accelerator
from toolkit.layout import Pair
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.workload import Workload
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import legality
from toolkit.recipe.schema import Recipe

_BLOCK = 16
"""Tokens that GPUs multiply at once in 8 bits."""


def problems(recipe: Recipe) -> Iterator[Problem]:
    """What the device, precision and lengths of the recipe do not suit."""
    try:
        device = accelerator(recipe.cluster.gpu)
    except PlanError:
        return  # reported by the rule about `cluster.gpu`
    precision = recipe.training.precision
    on_cpu = device.generation == "cpu"
    if precision != "bf16" and not (on_cpu and precision == "fp32"):
        yield Problem(
            "training.precision",
            f"{precision} with fp8",
            "bf16 with fp8 (on CPUs, where 8 bits are emulated, also fp32)",
            "set training.precision to bf16, or remove fp8",
        )
    if not on_cpu and device.fp8 is None:
        found, fix = f"{device.name} with fp8, for which it has no units", "remove fp8"
        yield Problem("cluster.gpu", found, "a GPU from Ada or Hopper on", fix)
    key, length = "training.sequence_length", recipe.training.sequence_length
    if length % _BLOCK:
        allowed = f"a multiple of {_BLOCK} with fp8, which GPUs multiply in blocks"
        fix = f"set {key} to {-(-length // _BLOCK) * _BLOCK}, or remove fp8"
        yield Problem(key, f"{length} with fp8", allowed, fix)


def refusals(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """Models and ZeRO stages whose layers torchao does not convert."""
    stages, stage = legality.table()[pair].kernel_stages, job.parallel.zero.stage
    fp8 = job.features["fp8"]
    assert isinstance(fp8, Fp8Section)
    context, length = job.parallel.context, job.training.sequence_length
    # Lengths that no block divides are reported above.
    if isinstance(context, int) and not length % _BLOCK and length % (_BLOCK * context):
        yield Problem(
            "parallel.context",
            f"{context} with fp8 and sequences of {length} tokens",
            f"a degree whose ranks compute a multiple of {_BLOCK} tokens",
            "set parallel.context to a smaller degree, or remove fp8",
        )
    if not stages:
        yield Problem(
            "fp8",
            f"settings for {pair}",
            "null for megatron-core's models, whose fp8 is Transformer Engine's",
            "set parallel.engine and parallel.model to auto, or remove fp8",
        )
    elif stage not in ("auto", *stages):
        yield Problem(
            "parallel.zero.stage",
            f"{stage} with fp8",
            f"{', '.join(map(str, stages))} for {pair}",
            "set parallel.zero.stage to auto, or parallel.engine to fsdp",
        )
    elif job.spec.moe_layers:
        yield Problem(
            "fp8",
            "settings for a model with experts",
            "null with experts, whose weights are stacked: torchao's products take single ones",
            "remove fp8",
        )
    elif fp8.converted(job.spec.layers) <= 0:
        yield Problem(
            "fp8.layers_in_bf16",
            f"first: {fp8.layers_in_bf16.first}, last: {fp8.layers_in_bf16.last}",
            f"fewer than the model's {job.spec.layers} layers together",
            "lower them, or remove fp8",
        )


def workload(plain: Workload, fp8: Fp8Section) -> Workload:
    """The share of the layers whose products are in 8 bits."""
    layers = plain.spec.layers
    kept = layers - fp8.converted(layers)
    return replace(plain, precision="fp8", fp8_layers=1 - kept / layers)


def rehearsed(fp8: Fp8Section) -> Fp8Section:
    """In all of the few layers of a small model."""
    return Fp8Section(recipe=fp8.recipe)


def ledger(
    fp8: Fp8Section, _plan: Plan, spec: ModelSpec, _config: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Which products are rounded, and whether the layout changes their scales."""
    products = (
        f"matrix products of {fp8.converted(spec.layers)} of {spec.layers} layers round their "
        f"operands to 8 bits, scaled {fp8.recipe}"
    )
    why = f"{products}: alike in every layout, but another last digit may flip a code"
    if fp8.recipe == "tensorwise":
        why = f"{products}: by one number per micro batch and rank, which the layout changes"
    yield "approximated", "fp8", why
