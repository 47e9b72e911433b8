"""Roofline time of a layer's operators on one rank, from their shapes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from toolkit.hardware.catalogue import Gpu
from toolkit.plan.efficiency import Efficiency
from toolkit.plan.workload import Workload


@dataclass(frozen=True)
class Device:
    """An accelerator's sustained rates in one precision."""

    matmul: float
    matmul_bytes: int
    plain_matmul: float
    """Of what stays in 16 bits beside fp8: attention and logits."""
    attention: float
    memory: float
    multiprocessors: int
    half_k: float
    half_sequence: float
    kernel_s: float
    gap_s: float


def device(gpu: Gpu, workload: Workload, efficiency: Efficiency) -> Device:
    precision = workload.precision
    peak = gpu.peak_flops(precision)
    plain = gpu.peak_flops("bf16") or gpu.fp16 if precision == "fp8" else peak
    assert peak and plain and gpu.memory_bytes_per_s
    kernel = gpu.generation
    if workload.engine == "megatron" and kernel in ("hopper", "blackwell"):
        kernel = f"{kernel}-te"
    share = efficiency.matmul[gpu.name]
    return Device(
        matmul=peak * share,
        matmul_bytes={"fp32": 4, "fp8": 1}.get(precision, 2),
        plain_matmul=plain * share,
        attention=plain * efficiency.attention[kernel],
        memory=gpu.memory_bytes_per_s * efficiency.memory,
        multiprocessors=gpu.multiprocessors,
        half_k=efficiency.half_k,
        half_sequence=efficiency.attention_half_seq,
        kernel_s=efficiency.kernel_s,
        gap_s=efficiency.gap_s,
    )


TILES = ((256, 128, 1.0), (128, 128, 0.92), (128, 64, 0.75))


@lru_cache(maxsize=65536)
def matmul_s(
    m: float,
    n: float,
    k: float,
    rate: float,
    memory: float,
    width: int,
    sms: int,
    half_k: float,
) -> float:
    """[m, k] times [k, n]."""
    best = 0.0
    for rows, columns, quality in TILES:
        for r, c in ((rows, columns), (columns, rows)):
            tiles = ceil(m / r) * ceil(n / c)
            useful = m * n / (r * c)
            waves = ceil(tiles / sms)
            best = max(best, quality * useful / (waves * sms))
    # splitting k over idle multiprocessors
    flops = 2.0 * m * n * k
    t = flops / (rate * best * k / (k + half_k))
    return max(t, width * (m * k + k * n + m * n) / memory)


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass of one layer (or of the head) on one rank, by kind."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launch: float = 0.0

    @property
    def total(self) -> float:
        return self.matmul + self.attention + self.elementwise + self.launch


@dataclass(frozen=True)
class LayerTime:
    forward: Pass
    backward: Pass
    recompute: Pass
    """What the backward pass repeats of the forward pass."""


@dataclass(frozen=True)
class Slice:
    """The part of a layer that one rank computes."""

    tokens: int
    """Of one micro batch on this rank (context parallel divides the sequence)."""
    micro: int
    tp: int
    cp: int
    ep: int
    sequence_parallel: bool


def _layer_matmuls(workload: Workload, part: Slice) -> Iterator[tuple[float, float, float]]:
    """Output features and inner size of the dense products, times; by rank."""
    spec, tp = workload.spec, part.tp
    heads = (spec.heads + 2 * spec.kv_heads) * spec.head_dim / tp
    yield part.tokens, heads, spec.hidden
    yield part.tokens, spec.hidden, spec.heads * spec.head_dim / tp


def _mlp_matmuls(
    workload: Workload, part: Slice, moe: bool
) -> Iterator[tuple[float, float, float, float]]:
    """(count, m, n, k)"""
    spec = workload.spec
    gate = 2 if spec.gated_mlp else 1
    if not moe:
        inner = spec.intermediate / part.tp
        yield 1, part.tokens, gate * inner, spec.hidden
        yield 1, part.tokens, spec.hidden, inner
        return
    inner, local = spec.expert_intermediate, spec.experts / part.ep
    tokens = part.tokens * spec.experts_per_token / local
    if part.ep > 1:
        tokens /= part.tp
    else:
        inner /= part.tp
    yield local, tokens, gate * inner, spec.hidden
    yield local, tokens, spec.hidden, inner


@lru_cache(maxsize=16384)
def layer_time(
    workload: Workload, part: Slice, recompute: str, dev: Device, moe: bool = False
) -> LayerTime:
    spec = workload.spec

    def mm(m: float, n: float, k: float) -> float:
        return matmul_s(
            m, n, k, dev.matmul, dev.memory, dev.matmul_bytes, dev.multiprocessors, dev.half_k
        )

    products = [(1.0, *one) for one in _layer_matmuls(workload, part)]
    products += list(_mlp_matmuls(workload, part, moe))
    forward_mm = sum(c * mm(m, n, k) for c, m, n, k in products)
    backward_mm = sum(c * (mm(m, k, n) + mm(n, k, m)) for c, m, n, k in products)
    attention_f, attention_b = _attention(workload, part, dev)
    elementwise_f, elementwise_b = (
        b / dev.memory for b in elementwise_bytes(workload, part, moe)
    )
    kernels = kernel_counts(workload, part)
    forward = _launched(forward_mm, attention_f, elementwise_f, kernels, dev)
    backward = _launched(backward_mm, attention_b, elementwise_b, 2 * kernels, dev)
    none = Pass()
    if recompute == "full":
        again = forward
    elif recompute == "selective" and workload.engine == "megatron":
        again = Pass(attention=attention_f)
    elif recompute == "selective":
        again = Pass(forward_mm / 2, 0.0, elementwise_f, forward.launch)
    else:
        again = none
    return LayerTime(forward, backward, again)


def _launched(
    mm: float, attention: float, elementwise: float, kernels: float, dev: Device
) -> Pass:
    busy = mm + attention + elementwise + kernels * dev.gap_s
    launch = max(busy, kernels * dev.kernel_s) - mm - attention - elementwise
    return Pass(mm, attention, elementwise, launch)


def kernel_counts(workload: Workload, part: Slice) -> float:
    count = 14.0 if workload.fused_elementwise else 40.0
    if workload.attention == "unfused":
        count += 6
    if part.tp > 1:
        count += 4
    return count


def _attention(workload: Workload, part: Slice, dev: Device) -> tuple[float, float]:
    spec, seq = workload.spec, workload.sequence_length
    keys = seq
    width = spec.heads * spec.head_dim / part.tp
    flops = 4.0 * part.tokens * keys * width
    if workload.attention == "fused":
        # masked half skipped
        local = seq / part.cp
        rate = dev.attention * min(1.0, 0.6 + 0.4 * spec.head_dim / 128)
        rate *= local / (local + dev.half_sequence)
        return flops / 2 / rate, 2.5 * flops / 2 / rate / 0.85
    scores = part.tokens * keys * spec.heads / part.tp
    product = max(flops / 2 / dev.plain_matmul, 2.0 * scores / dev.memory)
    forward = 2 * product + 9.0 * scores / dev.memory
    backward = 4 * product + 13.0 * scores / dev.memory
    return forward, backward


def elementwise_bytes(workload: Workload, part: Slice, moe: bool) -> tuple[float, float]:
    spec = workload.spec
    h, t = spec.hidden, part.tokens
    split = part.tp if part.sequence_parallel else 1
    inner = spec.intermediate / part.tp
    if moe:
        inner = spec.expert_intermediate * spec.experts_per_token / part.tp
    heads = (spec.heads + spec.kv_heads) * spec.head_dim / part.tp
    rotary = 0 if spec.learned_positions else 4 * heads
    if workload.fused_elementwise:
        f = 22 * h / split + (6 if spec.gated_mlp else 4) * inner + rotary
        b = 34 * h / split + (10 if spec.gated_mlp else 8) * inner + rotary
    else:
        norm = 12 if spec.layer_norm else 30
        f = (2 * norm + 12) * h / split + (10 if spec.gated_mlp else 8) * inner + 6 * rotary
        b = (4 * norm + 12) * h / split + (16 if spec.gated_mlp else 14) * inner + 6 * rotary
    return f * t, b * t


@lru_cache(maxsize=4096)
def head_time(workload: Workload, part: Slice, dev: Device) -> tuple[Pass, Pass]:
    """Final norm, logits and loss: forward and backward."""
    spec = workload.spec
    vocab, h, t = spec.vocab / part.tp, spec.hidden, part.tokens
    mm = matmul_s(t, vocab, h, dev.plain_matmul, dev.memory, 2, dev.multiprocessors, dev.half_k)
    back = matmul_s(
        t, h, vocab, dev.plain_matmul, dev.memory, 2, dev.multiprocessors, dev.half_k
    )
    back += matmul_s(
        vocab, h, t, dev.plain_matmul, dev.memory, 2, dev.multiprocessors, dev.half_k
    )
    loss = t * vocab / dev.memory
    return Pass(matmul=mm, elementwise=20 * loss), Pass(matmul=back, elementwise=12 * loss)


@lru_cache(maxsize=4096)
def embedding_time(workload: Workload, part: Slice, dev: Device) -> tuple[Pass, Pass]:
    """Row lookup, and the scattered sum of its gradients."""
    moved = part.tokens * workload.spec.hidden
    return Pass(elementwise=6 * moved / dev.memory), Pass(elementwise=12 * moved / dev.memory)
