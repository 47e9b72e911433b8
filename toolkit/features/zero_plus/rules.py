"""What ZeRO++ requires of the layout and the machine, what it sends and what it rounds."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import Problem
from toolkit.features.zero_plus import ZeroPlusKeys
from toolkit.layout import Pair
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.workload import Workload
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules.legality import divisors, nearest, or_zero, table
from toolkit.recipe.schema import ParallelSection


def intent(
    keys: ZeroPlusKeys, parallel: ParallelSection, pair: Pair | None, ranks: int | None
) -> Iterator[Problem]:
    """It applies to weights that DeepSpeed gathers, in groups of equally many ranks."""
    if ranks is not None:
        yield from _groups(keys, ranks)
        return
    for name in keys.on:
        key, shown = f"parallel.zero.{name}", str(getattr(keys, name)).lower()
        if pair is None:
            yield from _stage(key, shown, parallel)
        elif table()[pair].largest("hpz") == 1:
            yield Problem(
                key,
                shown,
                f"null for {pair}: it is for transformers' models under deepspeed",
                f"remove it{or_zero(parallel, pair)}",
            )


def _stage(key: str, shown: str, parallel: ParallelSection) -> Iterator[Problem]:
    zero = parallel.zero
    if zero.stage not in (3, "auto"):
        yield Problem(
            key,
            f"{shown} with stage: {zero.stage}",
            "nothing below stage 3, which alone gathers weights",
            "set parallel.zero.stage to 3 (or auto)",
        )
    elif zero.offload_parameters not in ("none", "auto"):
        yield Problem(
            key,
            f"{shown} with offload_parameters: {zero.offload_parameters}",
            "nothing with offloaded parameters, whose second copy would be there as well",
            "remove it, or set parallel.zero.offload_parameters to none",
        )


def _groups(keys: ZeroPlusKeys, ranks: int) -> Iterator[Problem]:
    if keys.hpz is None or ranks % keys.hpz == 0:
        return
    fit = divisors(ranks)
    yield Problem(
        "parallel.zero.hpz",
        f"{keys.hpz} on {ranks} ranks",
        f"{' or '.join(map(str, fit))}: groups of equally many ranks",
        f"set parallel.zero.hpz to {nearest(keys.hpz, fit)}",
    )


def refusals(job: PlanRequest, _pair: Pair) -> Iterator[Problem]:
    """What DeepSpeed's quantizer does not support, or silently computes incorrectly.

    It is a CUDA operator (`QuantizerBuilder`). Weights are cast to fp16 before it, gradients
    are not: csrc/quantization/pt_binding.cpp (`ds_swizzle_quant`) reads their bits as fp16.
    Among the ranks of one node stage3.py (`__avg_scatter_grads`) does not quantize gradients.
    """
    precision, cluster = job.training.precision, job.cluster
    keys = job.features["zero_plus"]
    assert isinstance(keys, ZeroPlusKeys)
    for name in keys.on:
        key, why = f"parallel.zero.{name}", ""
        if name == "hpz":
            continue
        if cluster.gpu == "cpu":
            found, why = f"cluster.gpu: {cluster.gpu}", "GPUs: the quantizer is a CUDA kernel"
        elif precision == "fp32":
            found, why = f"precision: {precision}", "bf16 or fp16: the quantizer reads no fp32"
        elif name == "quantized_gradients" and precision != "fp16":
            found, why = f"precision: {precision}", "fp16: the quantizer reads its bits as fp16"
        elif name == "quantized_gradients" and cluster.nodes == 1:
            found, why = "cluster.nodes: 1", "several nodes: within one, nothing is quantized"
        if why:
            yield Problem(key, f"true with {found}", f"true only with {why}", f"remove {key}")


def workload(plain: Workload, keys: ZeroPlusKeys) -> Workload:
    """Gradients of 4 bits, weights of 8 bits in messages."""
    return replace(
        plain,
        reduce_bytes=0.5 if keys.quantized_gradients else plain.reduce_bytes,
        gather_bytes=1.0 if keys.quantized_weights else None,
    )


def ledger(
    keys: ZeroPlusKeys, plan: Plan, _spec: ModelSpec, _config: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """The copy is exact; messages are rounded."""
    layout = plan.layout
    if layout.hpz > 1:
        yield (
            "exact",
            "second copy of the weights",
            f"the same numbers, spread over {layout.hpz} ranks",
        )
    sharded = layout.dp * layout.cp
    ranks = f"{sharded:,} data-parallel ranks"
    if sharded > 1 and keys.quantized_gradients:
        why = f"gradients are summed over {ranks} in quantized blocks"
        yield "approximated", "gradient reduction", why
    if sharded > 1 and keys.quantized_weights:
        yield "approximated", "gathered weights", f"in quantized blocks, from {ranks}"
