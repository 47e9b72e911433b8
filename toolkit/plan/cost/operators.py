"""Seconds of a layer's operators on one rank, by roofline, from their shapes.

The time of a matrix product is its FLOPs at a rate that depends on its shape, or its bytes at
the memory bandwidth. Elementwise operators are limited by their bytes. Collectives are not
included.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from toolkit.errors import PlanError
from toolkit.layout import CostPrecision, Layout
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.efficiency import Efficiency
from toolkit.plan.cost.layer import eager_bytes, operators, tokens_of
from toolkit.plan.cost.workload import Workload
from toolkit.plan.hardware.catalogue import Gpu

KINDS = ("matmul", "attention", "elementwise", "launch")
"""Kinds of seconds in a pass. `launch` is the gaps between kernels."""
SAVED_PRODUCTS = 0.5
"""Share of the matrix products that FSDP's selective recompute keeps: every second one."""
BACKWARD_SCORES = 2.5
"""Products of fused attention in the backward pass, per product in the forward pass."""
OTHERS_PER_PRODUCT = 4.5
"""Other operators for each product of an expert that is computed by itself. An expert has 11
operators, thrice that with the backward pass. The host needs 0.2 ms for them: measured, 29 ms
for 128 experts of 16 × 16 on one core of a CPU."""


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
    attention_back: float
    """Rate of its backward pass as a share of the forward pass's."""
    gap_s: float
    """Gap between two kernels."""


@lru_cache(maxsize=1024)
def device(gpu: Gpu, workload: Workload, efficiency: Efficiency) -> Device:
    """The rates of `gpu`: measured, or a share of its peaks. An unknown one gets those of a
    nominal CPU.

    Raises PlanError for a precision that the accelerator lacks.
    """
    precision, share = workload.precision, efficiency.matmul(gpu.like or gpu.name)
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
        attention_back=efficiency["attention.backward"],
        gap_s=efficiency[f"kernel.gap_s{of}"],
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
    share = efficiency.matmul(gpu.like or gpu.name)
    return peak * share * (efficiency["matmul.fp8"] if precision == "fp8" else 1.0)


def attention_kernel(gpu: Gpu, workload: Workload) -> str:
    """Megatron with Transformer Engine (which also fuses elementwise operators) has kernels
    written for each generation since Hopper. PyTorch runs FlashAttention-2 on all of them, or
    cuDNN's, and its memory-efficient kernel where a mask isolates documents."""
    if workload.document_mask and gpu.generation in ("ampere", "hopper"):
        return f"{gpu.generation}.mask"
    if workload.flash_version == 1 and gpu.generation in ("ampere", "hopper"):
        return f"{gpu.generation}.1"
    engine = workload.cost.megatron_kernels and workload.fused_elementwise
    if (engine or workload.cudnn) and gpu.generation in ("hopper", "blackwell"):
        return f"{gpu.generation}.{'te' if engine else 'cudnn'}"
    return gpu.generation


# Matrix products


def matmul_s(m: float, n: float, k: float, device: Device, *, plain: bool = False) -> float:
    """Seconds of [m, k] · [k, n], or its memory limit. Along k, the start and end of a tile
    cost as much as `half_k` products."""
    rate = device.plain_matmul if plain else device.matmul
    width = device.width if plain else device.matmul_width
    moved = width * (m * k + k * n) + device.width * m * n
    return max(2.0 * m * n * (k + device.half_k) / rate, moved / device.memory)


# Attention


def _attention_s(workload: Workload, layout: Layout, device: Device) -> tuple[float, float]:
    """Forward and backward of softmax(q·kᵀ)·v on one rank."""
    if workload.attention == "fused":
        return _fused_attention_s(workload, layout, device)
    spec, width = workload.spec, device.width
    rows = tokens_of(workload, layout) * spec.heads / layout.tp
    scores = rows * workload.sequence_length
    flops = 2.0 * scores * spec.head_dim
    # Each of two products reads or writes all scores; head_dim is too small to hide that.
    one = max(flops / device.plain_matmul, width * scores / device.memory)
    if workload.attention == "eager":
        forward, backward = (
            eager_bytes(workload, way) * scores / device.memory
            for way in ("forward", "backward")
        )
        return 2 * one + forward, 4 * one + backward
    softmax = 2 * width * scores / device.memory
    # Dropout reads and writes scores and a mask of one byte each.
    dropout = (2 * width + 1) * scores / device.memory if workload.dropout else 0.0
    return 2 * one + softmax + dropout, 4 * one + 1.5 * softmax + dropout


def _fused_attention_s(
    workload: Workload, layout: Layout, device: Device
) -> tuple[float, float]:
    """FlashAttention: no scores in memory. The masked half is skipped, unless by a mask of
    documents.

    The backward pass computes five products where the forward pass computes two
    (arXiv:2205.14135, appendix B).
    """
    spec, sequence = workload.spec, workload.sequence_length
    keys = sequence if workload.document_mask else _mean_keys(spec, sequence)
    tokens = tokens_of(workload, layout)
    flops = 4.0 * tokens * spec.heads / layout.tp * spec.head_dim * keys
    on_rank = sequence / (layout.cp if layout.exchange == "all_gather" else 1)
    rate = device.attention * on_rank / (on_rank + device.half_sequence)
    return flops / rate, BACKWARD_SCORES * flops / (rate * device.attention_back)


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


def layer_symbols(workload: Workload, layout: Layout, device: Device) -> dict[str, float]:
    """Seconds of a layer's passes for one micro batch by kind, and which shares of the forward
    pass the backward pass repeats. The backward pass reaches only
    some layers where the first ones are frozen. In a pipeline, the slowest stage has none of
    these."""
    plain = Layout(
        tp=layout.tp, cp=layout.cp, ep=layout.ep, exchange=layout.exchange,
        sequence_parallel=layout.sequence_parallel, micro_batch=layout.micro_batch,
    )  # fmt: skip
    reached = workload.spec.reached if layout.pp == 1 else 1.0
    again = _repeated(workload, layout)
    passes = {
        name: one * (reached if name.startswith("backward") else 1.0)
        for name, one in _passes(workload, plain, device).items()
    }
    repeated = {f"again_{kind}": reached * again.get(kind, 0.0) for kind in KINDS}
    return passes | repeated | {"memory_bytes_per_s": device.memory}


def _repeated(workload: Workload, layout: Layout) -> Mapping[str, float]:
    """Shares of a forward pass that recompute repeats. `selective` is Megatron's core
    attention, or FSDP's policy by operators, which keeps attention and every second matrix
    product (torchtitan)."""
    if layout.recompute == "full":
        return dict.fromkeys(KINDS, 1.0)
    if layout.recompute == "none":
        return {}
    if workload.cost.selective == "attention":
        return {"attention": 1.0}
    return {"matmul": 1 - SAVED_PRODUCTS, "elementwise": 1.0, "launch": 1.0}


@lru_cache(maxsize=1 << 15)
def _passes(workload: Workload, layout: Layout, device: Device) -> dict[str, float]:
    """Seconds of both passes by kind. The mean over layers."""
    share = workload.spec.moe_layers / workload.spec.layers
    kinds = [
        (weight, _passes_of(workload, layout, device, experts=experts))
        for weight, experts in ((share, True), (1 - share, False))
        if weight
    ]
    return {name: sum(weight * one[name] for weight, one in kinds) for name in kinds[0][1]}


def _passes_of(
    workload: Workload, layout: Layout, device: Device, *, experts: bool
) -> dict[str, float]:
    """Seconds of both passes of a layer by kind: of a dense one, or of one with experts."""
    spec, ops = workload.spec, [*operators(workload, layout, experts=experts)]
    products = [op.product for op in ops if op.product]
    mlp, trained = products[2:], spec.trained_products
    back = []  # gradients of the inputs, then of the weights
    for count, m, n, k in products:
        back += [(count, m, k, n), (count * trained, k, n, m)]
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
    attention_s, attention_back_s = _attention_s(workload, layout, device)
    gaps_s = device.gap_s * _kernels(workload, layout, [int(count) for count, *_ in products])
    return {
        "forward_matmul_s": _products_s(products, device),
        "forward_attention_s": attention_s,
        "forward_elementwise_s": moved / device.memory,
        "forward_launch_s": gaps_s,
        "backward_matmul_s": _products_s(back, device),
        "backward_attention_s": attention_back_s,
        "backward_elementwise_s": moved_back / device.memory,
        "backward_launch_s": 2 * gaps_s,
    }


def _products_s(products: Sequence[tuple[float, ...]], device: Device) -> float:
    return sum(count * matmul_s(m, n, k, device) for count, m, n, k in products)


def _kernels(workload: Workload, layout: Layout, products: list[int]) -> float:
    """Kernels of one layer's forward pass, an operator each where nothing is fused, with so
    many `products` of each kind: several are those of experts in turn."""
    others = 10.0 if workload.fused_elementwise or workload.fused_norms else 36.0
    others += {"fused": 0, "unfused": 6, "eager": 12}[workload.attention]
    if layout.tp > 1:
        others += 4  # collectives
    if workload.grouped_experts:
        return others + len(products)
    in_turn = workload.megatron_layers or workload.stacks_experts
    if in_turn and not workload.fused_elementwise:
        others += OTHERS_PER_PRODUCT * sum(count for count in products if count > 1)
    return others + sum(products)


# Last stage


def head_symbols(workload: Workload, layout: Layout, device: Device) -> dict[str, float]:
    """Seconds of both passes of logits and loss. In chunks, the backward pass repeats the
    forward pass.

    Per logit and pass: a fused loss reads and writes it once. Otherwise it is cast to fp32, and
    maximum, exponential, sum and logarithm each read or write it.
    """
    spec, tokens = workload.spec, tokens_of(workload, layout)
    rows = workload.logit_rows(layout.tp)
    forward = matmul_s(tokens, rows, spec.hidden, device, plain=True)
    backward = matmul_s(tokens, spec.hidden, rows, device, plain=True) if spec.reached else 0.0
    if spec.trained_head:
        backward += matmul_s(spec.hidden, rows, tokens, device, plain=True)
    per_logit, per_logit_back = (4, 4) if workload.fused_loss else (22, 14)
    logit_byte_s = tokens * rows / device.memory
    if layout.loss != "whole":  # nobody measured Liger's kernel with one loss per token
        backward += forward
        per_logit_back += per_logit
    return {
        "head_forward_s": forward + per_logit * logit_byte_s,
        "head_backward_s": backward + per_logit_back * logit_byte_s,
    }
