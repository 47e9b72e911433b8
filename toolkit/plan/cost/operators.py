"""Seconds of a layer's operators on one rank, by roofline, from their shapes.

The time of a matrix product is its FLOPs at a rate that depends on its shape, or its bytes at
the memory bandwidth; elementwise operators are limited by their bytes. Collectives are not
included.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from toolkit.errors import PlanError
from toolkit.layout import CostPrecision, LossKernel, Recompute
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.eager import eager
from toolkit.plan.cost.efficiency import Efficiency
from toolkit.plan.cost.exchange import context_split
from toolkit.plan.cost.layer import Slice, mixed, operators
from toolkit.plan.cost.workload import Workload
from toolkit.plan.hardware.catalogue import Gpu

SAVED_PRODUCTS = 0.5
"""Share of the matrix products that FSDP's selective recompute keeps: every second one."""
BACKWARD_SCORES = 2.5
"""Products of fused attention in the backward pass, per product in the forward pass."""
OTHERS_PER_PRODUCT = 4.5
"""Of an expert that is computed by itself: with its two products 11 operators, thrice that with
the backward pass. The host needs 0.2 ms for them: measured, 29 ms for 128 experts of 16 × 16 on
one core of a CPU."""


@dataclass(frozen=True, eq=False)
class Device:
    """An accelerator's sustained rates under a workload."""

    matmul: float
    """FLOP/s of large products in the workload's precision."""
    matmul_width: float
    """Bytes of an element of their operands."""
    plain_matmul: float
    """FLOP/s of logits and attention, which stay in 16 bits with fp8."""
    width: int
    """Bytes of an activation's element."""
    attention: float
    """FLOP/s of the fused attention kernel on long sequences with heads of 128."""
    memory: float
    """Bytes per second of streaming kernels."""
    half_k: float
    """Inner size of a matrix product at which half of its rate is reached."""
    half_sequence: float
    """Tokens at which the attention kernel reaches half of its rate."""
    gap_s: float
    """Gap between two kernels."""
    efficiency: Efficiency


@lru_cache(maxsize=1024)
def device(gpu: Gpu, workload: Workload, efficiency: Efficiency) -> Device:
    """The rates of `gpu`: measured, or a share of its peaks; those of a nominal CPU for an
    unknown one.

    Raises PlanError for a precision that the accelerator lacks.
    """
    precision, share = workload.precision, efficiency[f"matmul.{gpu.like or gpu.name}"]
    matmul = _matmul_flops(gpu, precision, efficiency)
    width = 4 if precision == "fp32" else 2
    plain, matmul_width = matmul, float(width)
    if precision == "fp8":
        plain, matmul_width = _matmul_flops(gpu, "bf16", efficiency), 1.0
    measured = gpu.measured and gpu.measured.memory_bytes_per_s
    memory = gpu.memory_bytes_per_s or efficiency["cpu.bytes_per_s"]
    kernel = efficiency[f"attention.{attention_kernel(gpu, workload)}"]
    of = ".cpu" if gpu.generation == "cpu" else ""
    return Device(
        matmul=matmul,
        matmul_width=matmul_width,
        plain_matmul=plain,
        width=width,
        attention=plain / share * kernel,
        memory=measured or memory * efficiency["memory"],
        half_k=efficiency[f"matmul.half_k{of}"],
        half_sequence=efficiency[f"attention.half_sequence{of}"],
        gap_s=efficiency[f"kernel.gap_s{of}"],
        efficiency=efficiency,
    )


def _matmul_flops(gpu: Gpu, precision: CostPrecision, efficiency: Efficiency) -> float:
    """FLOP/s of large matrix products."""
    if gpu.measured and (measured := gpu.measured.peak_flops(precision)):
        return measured
    peak = gpu.peak_flops(precision)
    if peak is None and gpu.generation == "cpu":
        peak = efficiency["cpu.flops"]
    if peak is None:
        raise PlanError(
            f"training.precision: {gpu.name} has no {precision} units",
            fix="choose another precision or accelerator",
        )
    share = efficiency[f"matmul.{gpu.like or gpu.name}"]
    return peak * share * (efficiency["matmul.fp8"] if precision == "fp8" else 1.0)


def attention_kernel(gpu: Gpu, workload: Workload) -> str:
    """Megatron with Transformer Engine (which also fuses elementwise operators) has kernels
    written for each generation since Hopper; PyTorch runs FlashAttention-2 on all of them, or
    cuDNN's, and its memory-efficient kernel where a mask isolates documents."""
    if workload.document_mask and gpu.generation in ("ampere", "hopper"):
        return f"{gpu.generation}.mask"
    if workload.flash_version == 1 and gpu.generation in ("ampere", "hopper"):
        return f"{gpu.generation}.1"
    engine = workload.cost.megatron_kernels and workload.fused_elementwise
    if (engine or workload.cudnn) and gpu.generation in ("hopper", "blackwell"):
        return f"{gpu.generation}.{'te' if engine else 'cudnn'}"
    return gpu.generation


class Pass(NamedTuple):
    """Seconds of one pass of one layer, by kind."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0
    """Gaps between kernels."""
    flops: float = 0.0
    """FLOPs of the matrix products."""


class LayerTime(NamedTuple):
    """The passes of one layer; of a model with some expert layers, the mean over layers."""

    forward: Pass
    backward: Pass
    recompute: Pass
    """The part of the forward pass that the backward pass recomputes first."""

    def reached(self, share: float) -> "LayerTime":
        """The mean over layers if the backward pass goes through this share of them."""
        if share == 1:
            return self
        return LayerTime(
            self.forward,
            mixed(self.backward, Pass(), share),
            mixed(self.recompute, Pass(), share),
        )


# Matrix products


@lru_cache(maxsize=1 << 17)
def matmul_s(m: float, n: float, k: float, device: Device, *, plain: bool = False) -> float:
    """Seconds of [m, k] · [k, n], or its memory limit. Along k, the start and end of a tile
    cost as much as `half_k` products."""
    rate = device.plain_matmul if plain else device.matmul
    width = device.width if plain else device.matmul_width
    moved = width * (m * k + k * n) + device.width * m * n
    return max(2.0 * m * n * (k + device.half_k) / rate, moved / device.memory)


# Attention


def _attention_s(workload: Workload, part: Slice, device: Device) -> tuple[float, float]:
    """Forward and backward of softmax(q·kᵀ)·v on one rank."""
    if workload.attention == "fused":
        return _fused_attention_s(workload, part, device)
    spec, width = workload.spec, device.width
    scores = part.tokens * workload.sequence_length * spec.heads / part.tp
    flops = 2.0 * scores * spec.head_dim
    # Each of two products reads or writes all scores; head_dim is too small to hide that.
    one = max(flops / device.plain_matmul, width * scores / device.memory)
    if workload.attention == "eager":
        moved = eager(workload)
        forward, backward = (
            part.nbytes(width) * scores / device.memory
            for part in (moved.forward, moved.backward)
        )
        return 2 * one + forward, 4 * one + backward
    softmax = 2 * width * scores / device.memory
    # Dropout reads and writes scores and a mask of one byte each.
    dropout = (2 * width + 1) * scores / device.memory if workload.dropout else 0.0
    return 2 * one + softmax + dropout, 4 * one + 1.5 * softmax + dropout


def _fused_attention_s(workload: Workload, part: Slice, device: Device) -> tuple[float, float]:
    """FlashAttention: no scores in memory; the masked half is skipped, unless by a mask of
    documents.

    The backward pass computes five products where the forward pass computes two
    (arXiv:2205.14135, appendix B).
    """
    spec, sequence = workload.spec, workload.sequence_length
    keys = sequence if workload.document_mask else _mean_keys(spec, sequence)
    flops = 4.0 * part.tokens * spec.heads / part.tp * spec.head_dim * keys
    on_rank = sequence / part.cp
    rate = device.attention * on_rank / (on_rank + device.half_sequence)
    back = BACKWARD_SCORES * flops / (rate * device.efficiency["attention.backward"])
    return flops / rate, back


def _mean_keys(spec: ModelSpec, sequence: int) -> float:
    """Unmasked keys per query within the window, averaged over queries and layers."""
    span = min(sequence, spec.sliding_window or sequence)
    window = span * (1 - span / 2 / sequence)
    if spec.chunked:
        chunks, rest = divmod(sequence, span)
        window = (chunks * span**2 + rest**2) / 2 / sequence
    share = spec.sliding_layers / spec.layers
    return share * window + (1 - share) * sequence / 2


# Layers


@lru_cache(maxsize=1 << 15)
def layer_time(
    workload: Workload, part: Slice, recompute: Recompute, device: Device
) -> LayerTime:
    """One layer of one micro batch."""
    spec = workload.spec
    share = spec.moe_layers / spec.layers
    if share in (0, 1):
        return _layer_time(workload, part, recompute, device, experts=share == 1)
    with_experts = _layer_time(workload, part, recompute, device, experts=True)
    dense = _layer_time(workload, part, recompute, device, experts=False)
    passes = zip(with_experts, dense, strict=True)
    return LayerTime(*(mixed(one, other, share) for one, other in passes))


def _layer_time(
    workload: Workload, part: Slice, recompute: Recompute, device: Device, *, experts: bool
) -> LayerTime:
    spec = workload.spec
    # With queries and keys of its own positions: exchanged ones move no elements here.
    split = context_split(workload, "all_gather", part.tp, 1, part.tokens)
    ops = [*operators(workload, part, split, experts=experts)]
    products = [op.product for op in ops if op.product]
    mlp, trained = products[2:], spec.trained_products
    back = []  # gradients of the inputs, then of the weights
    for count, m, n, k in products:
        back += [(count, m, k, n), (count * trained, k, n, m)]
    attention, attention_back = _attention_s(workload, part, device)
    moved = device.width * sum(op.moved for op in ops)
    moved_back = device.width * sum(op.moved_back for op in ops)
    weights = sum(count * n * k for count, _, n, k in products)
    if workload.cost.sums_whole_gradients:  # on the device, in fp32; FSDP sums shards
        moved_back += trained * 8.0 * weights
    stack = device.width * sum(count * n * k for count, _, n, k in mlp)
    if experts and workload.adds_to_experts:
        moved, moved_back = moved + 2.0 * stack, moved_back + 2.0 * stack
        back += [(count, k, n, m) for count, m, n, k in mlp]
    if experts and workload.stacks_experts:
        if workload.grouped_experts:  # each pass copies the experts' weights into a stack
            moved, moved_back = moved + 2.0 * stack, moved_back + 2.0 * stack
        else:  # the gradient of each expert is a stack of zeros, which is added to the sum
            moved_back += 4.0 * trained * spec.experts * stack
    kernels = _kernels(workload, part, [int(count) for count, *_ in products])
    gaps_s = kernels * device.gap_s
    forward = Pass(
        _products_s(products, device),
        attention,
        moved / device.memory,
        gaps_s,
        _flops(products),
    )
    backward = Pass(
        _products_s(back, device), attention_back, moved_back / device.memory, 2 * gaps_s,
        _flops(back),
    )  # fmt: skip
    return LayerTime(forward, backward, _recomputed(workload, recompute, forward))


def _products_s(products: Iterable[tuple[float, ...]], device: Device) -> float:
    return sum(count * matmul_s(m, n, k, device) for count, m, n, k in products)


def _flops(products: Iterable[tuple[float, ...]]) -> float:
    return sum(2.0 * prod(product) for product in products)


def _recomputed(workload: Workload, recompute: Recompute, forward: Pass) -> Pass:
    """`selective` is Megatron's core attention, or FSDP's policy by operators, which keeps
    attention and every second matrix product (torchtitan)."""
    if recompute == "full":
        return forward
    if recompute == "none":
        return Pass()
    if workload.cost.selective == "attention":
        return Pass(attention=forward.attention)
    share = 1 - SAVED_PRODUCTS
    return Pass(share * forward.matmul, 0.0, forward.elementwise, forward.launch)


def _kernels(workload: Workload, part: Slice, products: list[int]) -> float:
    """Kernels of one layer's forward pass, an operator each where nothing is fused, with so
    many `products` of each kind: several are those of experts in turn."""
    others = 10.0 if workload.fused_elementwise or workload.fused_norms else 36.0
    others += {"fused": 0, "unfused": 6, "eager": 12}[workload.attention]
    if part.tp > 1:
        others += 4  # collectives
    if workload.grouped_experts:
        return others + len(products)
    in_turn = workload.megatron_layers or workload.stacks_experts
    if in_turn and not workload.fused_elementwise:
        others += OTHERS_PER_PRODUCT * sum(count for count in products if count > 1)
    return others + sum(products)


# Last stage


@lru_cache(maxsize=1 << 13)
def head_time(
    workload: Workload, part: Slice, loss: LossKernel, device: Device
) -> tuple[float, float]:
    """Seconds of both passes of logits and loss; in chunks, the backward pass repeats the
    forward pass.

    Per logit and pass: a fused loss reads and writes it once; otherwise it is cast to fp32, and
    maximum, exponential, sum and logarithm each read or write it.
    """
    spec, tokens = workload.spec, float(part.tokens)
    rows = workload.logit_rows(part.tp)
    forward = matmul_s(tokens, rows, spec.hidden, device, plain=True)
    backward = matmul_s(tokens, spec.hidden, rows, device, plain=True) if spec.reached else 0.0
    if spec.trained_head:
        backward += matmul_s(spec.hidden, rows, tokens, device, plain=True)
    per_logit, per_logit_back = (4, 4) if workload.fused_loss else (22, 14)
    logit_byte_s = tokens * rows / device.memory
    if loss != "whole":  # nobody measured Liger's kernel with one loss per token
        backward += forward
        per_logit_back += per_logit
    return forward + per_logit * logit_byte_s, backward + per_logit_back * logit_byte_s
