"""Step time."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from toolkit.hardware.cluster import Cluster
from toolkit.plan.collectives import group, point_to_point_s
from toolkit.plan.efficiency import DEFAULT, Efficiency
from toolkit.plan.layout import Layout, stage_layers
from toolkit.plan.operators import (
    Pass,
    Slice,
    device,
    embedding_time,
    head_time,
    layer_time,
)
from toolkit.plan.workload import Workload


@dataclass(frozen=True)
class StageTime:
    forward_s: float
    backward_s: float
    p2p_s: float = 0.0


@dataclass(frozen=True)
class StepTime:
    total_s: float
    compute: Mapping[str, float]
    communication: Mapping[str, float]
    bubble_s: float
    optimizer_s: float
    offload_s: float
    overhead_s: float
    stages: tuple[StageTime, ...]
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu_causal: float | None
    mfu_full: float | None
    hfu_causal: float | None
    hfu_full: float | None


@lru_cache(maxsize=4096)
def rank_layers(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    chunks = stage_layers(layers, pp, vpp)
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


def step_time(
    workload: Workload, layout: Layout, cluster: Cluster, efficiency: Efficiency = DEFAULT
) -> StepTime:
    spec = workload.spec
    dev = device(cluster.gpu, workload, efficiency)
    tokens = layout.micro_batch * workload.sequence_length // layout.cp
    part = Slice(
        tokens, layout.micro_batch, layout.tp, layout.cp, layout.ep, layout.sequence_parallel
    )
    m = layout.gradient_accumulation
    share = workload.recomputed_layers if layout.recompute == "full" else 1.0
    layer = layer_time(workload, part, layout.recompute, dev)
    # communication inside a layer
    tp_f, tp_b = _tensor_comm(workload, layout, cluster, efficiency, tokens)
    tp_r = tp_f if layout.recompute == "full" else 0.0
    if workload.tensor_overlap:
        x = efficiency.tensor_overlap_exposed
        tp_f, tp_b, tp_r = tp_f * x, tp_b * x, tp_r * x
    cp_s = _context_comm(workload, layout, cluster, efficiency, tokens, layer)
    head = head_time(workload, part, dev)
    emb = embedding_time(workload, part, dev)
    counts = rank_layers(spec.layers, layout.pp, layout.vpp)
    lf = layer.forward.total + tp_f + cp_s
    lb = layer.backward.total + tp_b + 2 * cp_s + share * (layer.recompute.total + tp_r)
    p2p = _p2p(workload, layout, cluster, efficiency, tokens)
    stages = []
    for rank, n in enumerate(counts):
        f, b = n * lf, n * lb
        if rank == 0:
            f, b = f + emb[0].total, b + emb[1].total
        if rank == layout.pp - 1:
            f, b = f + head[0].total, b + head[1].total
        stages.append(StageTime(f, b, p2p))
    times = [s.forward_s + s.backward_s for s in stages]
    busiest = max(range(layout.pp), key=times.__getitem__)
    n = counts[busiest]
    last, first = busiest == layout.pp - 1, busiest == 0
    bubble = (sum(times) - times[busiest]) / layout.vpp
    pipeline = 0.0
    if layout.pp > 1:
        exposed = (
            1.0 if not workload.reduce_overlap or layout.vpp == 1 else efficiency.contention
        )
        pipeline = exposed * 2 * p2p * layout.vpp * m + 2 * p2p * (layout.pp - 1)
    compute = {
        "matmul": m * n * (layer.forward.matmul + layer.backward.matmul),
        "attention": m * n * (layer.forward.attention + layer.backward.attention),
        "elementwise": m * n * (layer.forward.elementwise + layer.backward.elementwise),
        "recompute": m * n * share * layer.recompute.total,
        "launch": m * n * (layer.forward.launch + layer.backward.launch),
        "logits": m * last * (head[0].total + head[1].total),
        "embedding": m * first * (emb[0].total + emb[1].total),
    }
    gather, reduce = _data_comm(workload, layout, cluster, efficiency, lf, lb, counts)
    communication = {
        "tensor": m * n * (tp_f + tp_b + share * tp_r),
        "context": m * n * 3 * cp_s,
        "expert": 0.0,
        "pipeline": pipeline,
        "data_gather": gather,
        "data_reduce": reduce,
    }
    optimizer = _optimizer(workload, layout, dev)
    overhead = efficiency.step_overhead_s
    total = sum(compute.values()) + sum(communication.values()) + bubble + optimizer + overhead
    batch_tokens = layout.global_batch * workload.sequence_length
    rate = batch_tokens / total
    peak = cluster.gpu.peak_flops(workload.precision)
    per_gpu = rate / layout.world

    def use(flops_per_token: float) -> float | None:
        return per_gpu * flops_per_token / peak if peak else None

    causal = spec.flops_per_token_causal(workload.sequence_length)
    full = spec.flops_per_token_full(workload.sequence_length)
    return StepTime(
        total,
        compute,
        communication,
        bubble,
        optimizer,
        0.0,
        overhead,
        tuple(stages),
        rate,
        per_gpu,
        use(causal),
        use(full),
        use(causal),
        use(full),
    )


def _tensor_comm(
    workload: Workload, layout: Layout, cluster: Cluster, eff: Efficiency, tokens: int
) -> tuple[float, float]:
    if layout.tp == 1:
        return 0.0, 0.0
    ring = group(layout.tp, 1, cluster, eff)
    size = 2 * tokens * workload.spec.hidden
    one = 2 * ring.all_gather_s(size) if layout.sequence_parallel else ring.all_reduce_s(size)
    return 2 * one, 2 * one


def _context_comm(workload, layout, cluster, eff, tokens, layer):
    if layout.cp == 1:
        return 0.0
    ring = group(layout.cp, layout.tp, cluster, eff)
    spec = workload.spec
    kv = 2 * 2 * tokens * spec.kv_heads * spec.head_dim / layout.tp
    t = kv * (layout.cp - 1) / ring.bytes_per_s + (layout.cp - 1) * ring.latency_s
    hidden = layer.forward.attention * (layout.cp - 1) / layout.cp
    return max(t - hidden, eff.contention * t)


def _p2p(workload, layout, cluster, eff, tokens):
    if layout.pp == 1:
        return 0.0
    size = 2 * tokens * workload.spec.hidden / layout.tp
    return point_to_point_s(size, layout.world // layout.pp, cluster, eff)


def rank_parameters(workload, layout, counts):
    spec = workload.spec
    p = spec.parameters
    body = (
        (p.attention + p.mlp) / layout.tp
        + p.norms
        + p.experts / (layout.ep if layout.ep > 1 else layout.tp)
    )
    vocab = spec.vocab * spec.hidden / layout.tp
    first = counts[0] / spec.layers * body + vocab
    lastn = counts[-1] / spec.layers * body + (
        0 if layout.pp == 1 and spec.tied_embeddings else vocab
    )
    if layout.pp == 1:
        return first + lastn - body
    return max(first, lastn)


def _reduce_bytes(workload):
    if workload.reduce_bytes:
        return workload.reduce_bytes
    if workload.precision == "fp32":
        return 4
    if workload.engine == "megatron":
        return 2 if workload.precision == "fp16" else 4
    return 4 if workload.engine == "fsdp" else 2


def _data_comm(workload, layout, cluster, eff, lf, lb, counts):
    size = layout.dp * layout.cp
    if size == 1:
        return 0.0, 0.0
    ring = group(size, layout.tp, cluster, eff)
    params = rank_parameters(workload, layout, counts)
    m = layout.gradient_accumulation
    n = max(counts)
    if layout.zero_stage == 3:
        units = n
        ag = ring.all_gather_s(2 * params / units)
        rs = ring.all_gather_s(_reduce_bytes(workload) * params / units)
        k = eff.fsdp_contention
        g = m * n * (max(ag - lf, k * ag) + k * ag)
        r = m * n * max(rs + (1 - k) * 0 + ag - lb - k * ag, k * rs)
        # backward: gather and reduce both within lb
        return g, r
    rb = _reduce_bytes(workload)
    if layout.zero_stage == 0:
        t = ring.all_reduce_s(rb * params)
        g = 0.0
    else:
        t, g = ring.all_gather_s(rb * params), ring.all_gather_s(2 * params)
    if not workload.reduce_overlap:
        return g, t
    c = eff.contention
    return max(g - n * lf, c * g), max(t - n * lb, c * t)


def _optimizer(workload, layout, dev):
    counts = rank_layers(workload.spec.layers, layout.pp, layout.vpp)
    params = rank_parameters(workload, layout, counts)
    shard = params / (layout.dp * layout.cp if layout.zero_stage else 1)
    return 50 * shard / dev.memory
