"""One transformer layer on one rank as a list of operators: what each keeps for the backward
pass, what it moves, and the shape of its product.

What is stored follows from autograd: a matrix product keeps its input, a norm its input, an
activation function its input, attention its query, key, value and output. In 16 bits and
without parallelism a GPT layer keeps 34·s·b·h bytes and 5·a·s²·b for unfused attention
(Korthikanti et al. 2022, arXiv:2205.05198, eq. 1). `tests/plan/test_memory.py` checks the
paper's equations 1 to 6 against this module.

Elements that move are counted one for each operand read or written: fused kernels move an
operand once, single PyTorch operators once each. Backward, a norm reads its input and the
gradient twice, and every residual sum is a sum of two gradients.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from toolkit.layout import Layout
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.workload import Workload

MASK_BYTES = 1
"""One element of a dropout mask."""
EAGER_RMS_NORM_BYTES = 4
"""Bytes per element that an RMSNorm of single PyTorch operators keeps in addition to its output
and the scaled copy that its weight multiplies: the fp32 copy of its input, instead of its
input."""
PARTS = ("norms", "qkv", "attention", "mlp", "experts")
"""Parts of a layer: the residual stream with its norms and dropout masks, queries with keys and
values, attention's output with what its kernel keeps, the dense feed-forward, mixture of
experts. The last two are means over layers."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a rank keeps of a micro batch per layer (the mean over layers), and what it
    also needs during one layer's backward pass."""

    stored: Mapping[str, float]
    """Bytes kept of each of `PARTS`."""
    whole: float
    """A layer that is not recomputed."""
    again: float
    """The recomputed activations of one layer."""
    gradients: float
    """The gradients of one layer."""

    @property
    def total(self) -> float:
        """All that is stored."""
        return sum(self.stored.values())


def tokens_of(workload: Workload, layout: Layout) -> float:
    """Tokens of one micro batch on a rank: context parallel divides the sequence."""
    return layout.micro_batch * workload.sample_tokens / layout.cp


def stream_of(workload: Workload, layout: Layout) -> float:
    """Tokens of the residual stream (norms, residual sums) on a rank."""
    tokens = tokens_of(workload, layout)
    return tokens / layout.tp if layout.sequence_parallel else tokens


class ContextSplit(NamedTuple):
    """Elements of attention on a rank of a context group, for one layer and micro batch.

    Each rank computes two of the 2·cp equal runs of a row, one from each end, so that under a
    causal mask all have equal work (Llama 3, arXiv:2407.21783, section 3.3.2). They gather keys
    and values (`all_gather`), or send each other heads, so that each attends with a part of
    them (`ulysses`). Keys of fewer heads than ranks are repeated.
    """

    query: float
    """Queries of its own positions. Equal to attention's output."""
    key: float
    """Keys of its own positions. Equal to the values."""
    attended_key: float
    """Keys that attention keeps for its backward pass."""
    kept: float
    """What is kept besides queries, keys, values and the output: that output before the heads
    were sent back, or of the two runs each for itself."""
    received: float
    """Elements that a rank receives in a forward pass."""
    buffers: float
    """Elements that are sent and received at once: those that are gathered before they are put
    in order, or those of all heads that are sent."""


def context_split(workload: Workload, layout: Layout) -> ContextSplit:
    """Elements of attention on a rank, for one layer and micro batch."""
    spec, tp, cp = workload.spec, layout.tp, layout.cp
    of_heads = tokens_of(workload, layout) * spec.head_dim
    query, key = of_heads * spec.heads / tp, of_heads * spec.kv_heads / tp
    kept = query if cp > 1 else 0.0
    if layout.exchange == "all_gather":
        return ContextSplit(query, key, key * cp, kept, 2 * key * (cp - 1), 2 * key * cp)
    keys = max(1, spec.kv_heads // tp)
    sent = key * (lcm(keys, cp) // keys)
    received = 2 * (query + sent) * (cp - 1) / cp
    return ContextSplit(query, key, sent, kept, received, query + 2 * sent)


class Eager(NamedTuple):
    """Attention by plain products: bytes per score in 16 bits, and in fp32."""

    kept: tuple[int, int]
    """For the backward pass."""
    workspace: tuple[int, int]
    """Alive at once in its backward pass besides what is kept and not yet freed."""
    forward: tuple[int, int]
    """Read or written in the forward pass, the two products left out."""
    backward: tuple[int, int]


# Counted in the operators of transformers' `eager_attention_forward` (models/llama, gemma2 and
# gpt_oss) and of our megatron-core layers' `EagerAttention` (models/megatron/attention.py).
# Both repeat keys and values for each query head, and add or fill in a mask; dropout is 0. In
# 16 bits the weights are a copy of fp32 ones. Backward, gradients of the weights are cast to
# fp32 (the weights are free), and the softmax makes those of the scores. Elements that move:
# scale 2 and 2, mask 2 and 0, casts 2 and 2 in fp32 each way, softmax 2 and 3 in fp32; a soft
# cap divides (2 and 2), takes the tanh (2 and 3) and multiplies (2 and 2).
_PLAIN = Eager(kept=(6, 4), workspace=(6, 0), forward=(28, 40), backward=(28, 36))
_CAPPED = Eager(kept=(8, 8), workspace=(6, 0), forward=(40, 64), backward=(42, 64))
# Sinks: transformers concatenates them in the compute precision, megatron-core in fp32.
# Backward, the gradient of what was cut off is written into zeros.
_SINKS = Eager(kept=(2, 4), workspace=(4, 8), forward=(22, 44), backward=(26, 52))
_MEGATRON_SINKS = Eager(kept=(6, 4), workspace=(10, 4), forward=(36, 48), backward=(40, 48))
# torch.compile keeps the first product and the weights, and makes the rest again: what
# inductor's graphs of gemma2's layers keep.
_COMPILED = Eager(kept=(4, 8), workspace=(4, 8), forward=(4, 8), backward=(6, 12))


def eager_bytes(workload: Workload, what: str) -> int:
    """Bytes per score of a field of `Eager`, where attention is `eager`."""
    sinks = _MEGATRON_SINKS if workload.megatron_layers else _SINKS
    kinds = {"plain": _PLAIN, "capped": _CAPPED, "sinks": sinks}
    found = _COMPILED if workload.fused_elementwise else kinds[workload.spec.scores]
    each: tuple[int, int] = getattr(found, what)
    return each[workload.width == FP32_BYTES]


class Op(NamedTuple):
    """One operator, or a chain of elementwise ones, of a layer's forward pass."""

    part: str
    """One of `PARTS`."""
    kept: float = 0.0
    """Bytes until the backward pass."""
    moved: float = 0.0
    """Elements that an elementwise operator reads and writes."""
    moved_back: float = 0.0
    product: tuple[float, ...] = ()
    """Count, tokens, outputs and inputs of a matrix product."""


def operators(workload: Workload, layout: Layout, *, experts: bool) -> Iterator[Op]:
    """Operators of a dense layer, or of one with experts."""
    yield from _norms(workload, layout)
    yield from _attention(workload, layout)
    yield from (_experts if experts else _mlp)(workload, layout)


def _norms(workload: Workload, layout: Layout) -> Iterator[Op]:
    """Two norms and the sums with the residual stream, and dropout in front of these."""
    spec, width = workload.spec, workload.width
    stream = stream_of(workload, layout) * spec.hidden
    fused = workload.fused_elementwise or workload.fused_norms
    # PyTorch's RMSNorm is a chain, partly in fp32.
    norm, back = (2, 4) if fused or spec.layer_norm else (13, 20)
    # Attention and MLP keep what they read. megatron-core gathers a norm's split output again
    # in the backward pass.
    kept = spec.norms_per_layer * _norm_bytes(workload) * stream
    kept += min(spec.norms_per_layer, 2) * width * stream
    yield Op("norms", kept, 2 * (norm + 3) * stream, 2 * (back + 3) * stream)
    if workload.dropout:  # a mask of half an element; a separate kernel in the backward pass
        yield Op("norms", 2 * MASK_BYTES * stream, stream, 5 * stream)


def _attention(workload: Workload, layout: Layout) -> Iterator[Op]:
    """Projections and rotary positions. What attention's kernel moves is in its own time."""
    spec, width, tokens = workload.spec, workload.width, tokens_of(workload, layout)
    split = context_split(workload, layout)
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    head_norms = split.query + split.key if spec.query_key_norm else 0.0
    kept = width * _projected(workload, split) + _norm_bytes(workload) * head_norms
    kept += _latents(workload, stream_of(workload, layout))
    yield Op("qkv", kept, product=(1, tokens, (queries + 2 * keys) / layout.tp, spec.hidden))
    if not spec.learned_positions:
        fused = workload.fused_elementwise or workload.fused_norms
        rotated = (2 if fused else 12) * tokens * (queries + keys) / layout.tp
        yield Op("qkv", 0.0, rotated, rotated)
    kept = width * (split.query + split.kept) + _kernel(workload, layout)
    yield Op("attention", kept, product=(1, tokens, spec.hidden, queries / layout.tp))


def _mlp(workload: Workload, layout: Layout) -> Iterator[Op]:
    spec, tokens = workload.spec, tokens_of(workload, layout)
    inner, elements = spec.intermediate / layout.tp, tokens * spec.intermediate / layout.tp
    gate = 2 if spec.gated_mlp else 1
    yield Op("mlp", product=(1, tokens, gate * inner, spec.hidden))
    moved, back, tensors = _activation(workload)
    kept = workload.width * tensors * elements
    back = back * elements + _bias(workload, layout, elements)
    yield Op("mlp", kept, moved * elements, back)
    yield Op("mlp", product=(1, tokens, spec.hidden, inner))


def _experts(workload: Workload, layout: Layout) -> Iterator[Op]:
    """Tokens times experts per token, spread evenly over ranks: balanced routing.

    Kept are the dispatched tokens, the experts' inner tensors and outputs, and the router's
    fp32 probabilities; of shared experts, which all tokens pass through, the inner tensors.
    megatron-core's single operators scale the input of the last product by the probability, and
    also keep it unscaled.
    """
    spec, width, tp = workload.spec, workload.width, layout.tp
    tokens, stream = tokens_of(workload, layout), stream_of(workload, layout)
    each, inner = spec.experts_per_token, float(spec.expert_intermediate)
    count = spec.experts / layout.ep
    of_expert = tokens * (each / count)
    if layout.ep > 1:
        of_expert /= tp  # experts are whole; the group's tokens are distributed
    else:
        inner /= tp
    gate = 2 if spec.gated_mlp else 1
    yield Op("experts", product=(count, of_expert, gate * inner, spec.hidden))
    moved, back, tensors = _activation(workload)
    held = (tensors + _single_megatron(workload)) * each * spec.expert_intermediate
    held += tensors * spec.shared_intermediate
    kept = (
        2 * width * stream * each * spec.hidden
        + width * held * tokens / tp
        + FP32_BYTES * stream * spec.experts
    )
    elements = tokens * each * spec.expert_intermediate / tp
    back = back * elements + _bias(workload, layout, elements)
    yield Op("experts", kept, moved * elements, back)
    # Tokens are sorted by expert, and summed with their weights.
    routed = 5 * tokens * each * spec.hidden / tp
    yield Op("experts", 0.0, routed, routed)
    yield Op("experts", product=(count, of_expert, spec.hidden, inner))


def _activation(workload: Workload) -> tuple[float, float, int]:
    """An MLP's activation function: how often it moves a tensor of the inner size, ahead and
    back, and how many such tensors are kept.

    Plain (GELU, squared ReLU): input and output. Gated: gate, up and the product; in single
    operators, also the activated gate, and of megatron-core's a copy of up (its `glu` adds an
    offset, 0).
    """
    if not workload.spec.gated_mlp:
        return 2, 3, 2
    if workload.fused_elementwise or workload.fused_glu:
        return 3, 5, 3
    return 5, 8, 5 if _single_megatron(workload) else 4


def _bias(workload: Workload, layout: Layout, inner: float) -> float:
    """Gradients of biases are sums over all tokens."""
    if not workload.spec.mlp_bias:
        return 0.0
    return inner + 2 * stream_of(workload, layout) * workload.spec.hidden


def of_micro_batch(layout: Layout) -> Layout:
    """Everything that decides how a rank computes one micro batch of a layer and of the head.
    Results are kept by it, and are the same for many layouts."""
    return Layout(
        dp=layout.dp if layout.ep > 1 else 1,
        tp=layout.tp,
        pp=min(layout.pp, 2),
        cp=layout.cp,
        ep=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        recompute="full" if isinstance(layout.recompute, int) else layout.recompute,
        loss=layout.loss,
        exchange=layout.exchange,
        micro_batch=layout.micro_batch,
    )


def layer_activations(workload: Workload, layout: Layout) -> Activations:
    """What one micro batch leaves on a rank per layer."""
    split, width = context_split(workload, layout), workload.width
    whole = _everything(workload, layout)
    stored = dict(whole)
    if layout.recompute == "full":  # the input of each layer (Korthikanti et al., table 2)
        held = width * stream_of(workload, layout) * workload.spec.hidden
        stored = dict.fromkeys(PARTS, 0.0) | {"norms": held}
    elif layout.recompute == "selective" and workload.cost.selective == "products":
        stored |= _every_second_product(workload, layout, split)
    elif layout.recompute == "selective":
        # megatron-core recomputes core attention (Korthikanti et al., section 5).
        if workload.attention == "eager":  # keys and values are repeated again
            plain = split.query + 2 * split.key + _rotated(workload, split)
            stored["qkv"] += width * (plain - _projected(workload, split))
        stored["attention"] = width * split.query
    # The last recomputed layer is completely in memory again, together with the gradients.
    total = sum(whole.values())
    again = max(0.0, total - sum(stored.values()))
    gradients = _gradients(workload, layout, split, whole) + _changed_experts(workload)
    return Activations(stored, total, again, gradients)


def _everything(workload: Workload, layout: Layout) -> dict[str, float]:
    """Nothing is recomputed."""
    spec, kept = workload.spec, dict.fromkeys(PARTS, 0.0)
    experts = _experts(workload, layout) if spec.moe_layers else ()
    for op in (*operators(workload, layout, experts=False), *experts):
        if op.kept:
            kept[op.part] += op.kept
    kept["mlp"] *= 1 - spec.moe_layers / spec.layers
    kept["experts"] = kept["experts"] * spec.moe_layers / spec.layers
    kept["experts"] += _changed_experts(workload)
    return kept


def _projected(workload: Workload, split: ContextSplit) -> float:
    """Elements of queries, keys and values that attention keeps, and of plain ones."""
    spec = workload.spec
    if workload.attention == "eager" and (workload.megatron_layers or spec.grouped):
        return 3 * split.query  # copies, one of keys and of values per query head
    return split.query + 2 * split.attended_key + _rotated(workload, split)


def _rotated(workload: Workload, split: ContextSplit) -> float:
    """Elements of rotated queries and keys in models where the values, a view of the fused
    product, also keep the unrotated ones: megatron-core's, and some of transformers'. GPT-NeoX
    also copies attention's output, but its two norms share their input."""
    spec = workload.spec
    rotary = not (spec.learned_positions or spec.latent)
    views = _single_megatron(workload) or (spec.fused_qkv and not workload.megatron_layers)
    return split.query + split.key if views and rotary else 0.0


def _single_megatron(workload: Workload) -> bool:
    """Whether these are megatron-core's layers of single operators."""
    return workload.megatron_layers and not workload.fused_elementwise


def _latents(workload: Workload, tokens: float) -> float:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) normalises the latent
    vectors and projects the result. In single operators, a norm keeps its own copies of its
    input."""
    width = workload.width
    norm = EAGER_RMS_NORM_BYTES + width if _eager_norms(workload) else width
    return (norm + width) * workload.spec.latent * tokens


def _norm_bytes(workload: Workload) -> int:
    """Bytes that a norm keeps per element besides its output: its input. Single operators keep
    their fp32 copy of it and, if the weight trains, what it multiplies."""
    if workload.spec.wide_norms and not (workload.fused_elementwise or workload.fused_norms):
        return 2 * FP32_BYTES
    width = workload.width
    if _eager_norms(workload):
        return EAGER_RMS_NORM_BYTES + (width if workload.spec.adapters is None else 0)
    return width


def _eager_norms(workload: Workload) -> bool:
    """transformers' RMSNorm is not one kernel, but megatron-core's and every LayerNorm is."""
    fused = workload.fused_elementwise or workload.fused_norms
    return not (workload.megatron_layers or fused or workload.spec.layer_norm)


def _kernel(workload: Workload, layout: Layout) -> float:
    """What attention itself keeps between the query-key product and its output."""
    rows = tokens_of(workload, layout) / layout.tp * workload.spec.heads
    if workload.attention == "fused":  # FlashAttention, arXiv:2205.14135: fp32 row sums
        return FP32_BYTES * rows
    width, scores = workload.width, rows * workload.sequence_length
    if workload.attention == "eager":
        return eager_bytes(workload, "kept") * scores
    per_score = width  # the softmax's output
    if workload.dropout:
        per_score += MASK_BYTES + width  # the mask, and the product's input
    if not workload.fused_elementwise and width < FP32_BYTES:
        per_score += FP32_BYTES  # the softmax in fp32, rounded afterwards
    return per_score * scores


def _changed_experts(workload: Workload) -> float:
    """The weights of a layer's experts with their adapters added."""
    if not workload.adds_to_experts:
        return 0.0
    return workload.width * workload.spec.parameters.experts / workload.spec.layers


def _every_second_product(
    workload: Workload, layout: Layout, split: ContextSplit
) -> dict[str, float]:
    """torchtitan's selective recompute per operator: attention and every second product; of
    experts everything.

    Of query, key, value, output, gate, up and down (or in and out), the odd ones are kept,
    and the output of each reduce-scatter of the tensor group.
    """
    spec, width = workload.spec, workload.width
    dense = 1 - spec.moe_layers / spec.layers
    scattered = 2 if layout.tp > 1 else 0
    down = tokens_of(workload, layout) * spec.hidden if spec.gated_mlp else 0.0
    return {
        "norms": (1 + scattered) * width * stream_of(workload, layout) * spec.hidden,
        "qkv": width * (split.query + split.key),
        "attention": width * split.query + _kernel(workload, layout),
        "mlp": dense * width * (_inner(workload, layout) + down),
    }


def _inner(workload: Workload, layout: Layout) -> float:
    """Elements of an inner tensor of a dense MLP, or of experts if all layers have them."""
    spec, split = workload.spec, tokens_of(workload, layout) / layout.tp
    if spec.moe_layers == spec.layers:
        return split * spec.experts_per_token * spec.expert_intermediate
    return split * spec.intermediate


def _gradients(
    workload: Workload, layout: Layout, split: ContextSplit, whole: Mapping[str, float]
) -> float:
    """Gradients alive at once in a layer's backward: those of its largest part. What the MLP
    kept (of `whole`) is free when attention's are made."""
    spec, width, inner = workload.spec, workload.width, _inner(workload, layout)
    tokens = tokens_of(workload, layout)
    mlp = width * (3 if spec.gated_mlp else 2) * inner
    scores = tokens / layout.tp * spec.heads * workload.sequence_length
    around = width * 2 * tokens * spec.hidden
    if workload.attention == "eager":
        own = eager_bytes(workload, "workspace") * scores
        freed = whole["mlp"] + whole["experts"]
        return around + max(mlp, width * 2 * split.query + own - freed)
    attention = 2 * (split.query + 2 * split.attended_key)
    if workload.attention == "unfused":
        attention += 2 * scores
    return around + max(mlp, width * attention)
