"""One transformer layer on one rank as a list of operators: what each keeps for the backward
pass, what it moves, and the shape of its product.

What is stored follows from autograd: a matrix product keeps its input, a norm its input, an
activation function its input, attention its query, key, value and output. In 16 bits and
without parallelism a GPT layer keeps 34·s·b·h bytes and 5·a·s²·b for unfused attention
(Korthikanti et al. 2022, arXiv:2205.05198, eq. 1); `tests/plan/test_memory.py` checks the
paper's equations 1 to 6 against this module.

Elements that move are counted one for each operand read or written: fused kernels move an
operand once, single PyTorch operators once each. Backward, a norm reads its input and the
gradient twice, and every residual sum is a sum of two gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from toolkit.layout import Layout
from toolkit.plan.cost.eager import eager
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.exchange import ContextSplit, context_split
from toolkit.plan.cost.workload import Workload

MASK_BYTES = 1
"""One element of a dropout mask."""
EAGER_RMS_NORM_BYTES = 4
"""Bytes per element that an RMSNorm of single PyTorch operators keeps in addition to its output
and the scaled copy that its weight multiplies: the fp32 copy of its input, instead of its
input."""


class LayerActivations(NamedTuple):
    """Bytes on one rank for one micro batch and one layer (the mean over layers)."""

    norms: float
    """The residual stream: inputs and outputs of the norms, dropout masks."""
    qkv: float
    """Queries, keys and values, and the latent vectors that they are projected from."""
    attention: float
    """Attention's output and what its kernel keeps: scores, or their row sums."""
    mlp: float
    """Dense feed-forward, the mean over layers."""
    experts: float
    """Mixture of experts: dispatched tokens, expert activations, the mean over layers."""

    @property
    def total(self) -> float:
        """All parts."""
        return self.norms + self.qkv + self.attention + self.mlp + self.experts


Mixed = TypeVar("Mixed", bound=tuple[float, ...])


def mixed(one: Mixed, other: Mixed, share: float) -> Mixed:
    """Weighted mean of every field: `share` of one and the rest of the other."""
    pairs = zip(one, other, strict=True)
    of_kind: Callable[..., Mixed] = type(one)
    return of_kind(*(share * mine + (1 - share) * theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class Activations:
    """What a rank keeps per layer, and what it also needs during one layer's backward pass."""

    stored: LayerActivations
    whole: float
    """Bytes of a layer that is not recomputed."""
    again: float
    """Bytes of the recomputed activations of one layer."""
    gradients: float
    """Bytes of the gradients of one layer."""


@dataclass(frozen=True)
class Slice:
    """The part of one micro batch that a rank computes."""

    tokens: float
    """Context parallel divides the sequence."""
    tp: int
    cp: int
    ep: int
    sequence_parallel: bool

    @property
    def stream(self) -> float:
        """Tokens of the residual stream (norms, residual sums) on this rank."""
        return self.tokens / self.tp if self.sequence_parallel else self.tokens


class Op(NamedTuple):
    """One operator, or a chain of elementwise ones, of a layer's forward pass."""

    part: str
    """A field of `LayerActivations`."""
    kept: float = 0.0
    """Bytes until the backward pass."""
    moved: float = 0.0
    """Elements that an elementwise operator reads and writes."""
    moved_back: float = 0.0
    product: tuple[float, ...] = ()
    """Count, tokens, outputs and inputs of a matrix product."""


def operators(
    workload: Workload, part: Slice, split: ContextSplit, *, experts: bool
) -> Iterator[Op]:
    """Operators of a dense layer, or of one with experts."""
    yield from _norms(workload, part)
    yield from _attention(workload, part, split)
    yield from (_experts if experts else _mlp)(workload, part)


def _norms(workload: Workload, part: Slice) -> Iterator[Op]:
    """Two norms and the sums with the residual stream, and dropout in front of these."""
    spec, width = workload.spec, workload.width
    stream, whole = part.stream * spec.hidden, part.tokens * spec.hidden
    fused = workload.fused_elementwise or workload.fused_norms
    # PyTorch's RMSNorm is a chain, partly in fp32.
    norm, back = (2, 4) if fused or spec.layer_norm else (13, 20)
    # Attention and MLP keep what they read. megatron-core gathers a norm's split output again
    # in the backward pass; torch's tensor parallel keeps it gathered.
    read = whole if workload.cost.gathers_norms else stream
    kept = spec.norms_per_layer * _norm_bytes(workload) * stream
    kept += min(spec.norms_per_layer, 2) * width * read
    yield Op("norms", kept, 2 * (norm + 3) * stream, 2 * (back + 3) * stream)
    if workload.dropout:  # a mask of half an element; a separate kernel in the backward pass
        yield Op("norms", 2 * MASK_BYTES * stream, stream, 5 * stream)


def _attention(workload: Workload, part: Slice, split: ContextSplit) -> Iterator[Op]:
    """Projections and rotary positions; what attention's kernel moves is in its own time."""
    spec, width, tokens = workload.spec, workload.width, part.tokens
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    head_norms = split.query + split.key if spec.query_key_norm else 0.0
    kept = width * _projected(workload, split) + _norm_bytes(workload) * head_norms
    kept += _latents(workload, part.stream)
    yield Op("qkv", kept, product=(1, tokens, (queries + 2 * keys) / part.tp, spec.hidden))
    if not spec.learned_positions:
        fused = workload.fused_elementwise or workload.fused_norms
        rotated = (2 if fused else 12) * tokens * (queries + keys) / part.tp
        yield Op("qkv", 0.0, rotated, rotated)
    kept = width * (split.query + split.kept) + _kernel(workload, part)
    yield Op("attention", kept, product=(1, tokens, spec.hidden, queries / part.tp))


def _mlp(workload: Workload, part: Slice) -> Iterator[Op]:
    spec, inner = workload.spec, workload.spec.intermediate / part.tp
    elements = part.tokens * spec.intermediate / part.tp
    gate = 2 if spec.gated_mlp else 1
    yield Op("mlp", product=(1, part.tokens, gate * inner, spec.hidden))
    moved, back, tensors = _activation(workload)
    kept = workload.width * tensors * elements
    back = back * elements + _bias(workload, part, elements)
    yield Op("mlp", kept, moved * elements, back)
    yield Op("mlp", product=(1, part.tokens, spec.hidden, inner))


def _experts(workload: Workload, part: Slice) -> Iterator[Op]:
    """Tokens times experts per token, spread evenly over ranks: balanced routing.

    Kept are the dispatched tokens, the experts' inner tensors and outputs, and the router's
    fp32 probabilities; of shared experts, which all tokens pass through, the inner tensors.
    megatron-core's single operators scale the input of the last product by the probability, and
    also keep it unscaled.
    """
    spec, width, each = workload.spec, workload.width, workload.spec.experts_per_token
    count, inner = spec.experts / part.ep, float(spec.expert_intermediate)
    tokens = part.tokens * (each / count)
    if part.ep > 1:
        tokens /= part.tp  # experts are whole; the group's tokens are distributed
    else:
        inner /= part.tp
    gate = 2 if spec.gated_mlp else 1
    yield Op("experts", product=(count, tokens, gate * inner, spec.hidden))
    moved, back, tensors = _activation(workload)
    held = (tensors + _single_megatron(workload)) * each * spec.expert_intermediate
    held += tensors * spec.shared_intermediate
    kept = (
        2 * width * part.stream * each * spec.hidden
        + width * held * part.tokens / part.tp
        + FP32_BYTES * part.stream * spec.experts
    )
    elements = part.tokens * each * spec.expert_intermediate / part.tp
    back = back * elements + _bias(workload, part, elements)
    yield Op("experts", kept, moved * elements, back)
    # Tokens are sorted by expert, and summed with their weights.
    routed = 5 * part.tokens * each * spec.hidden / part.tp
    yield Op("experts", 0.0, routed, routed)
    yield Op("experts", product=(count, tokens, spec.hidden, inner))


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


def _bias(workload: Workload, part: Slice, inner: float) -> float:
    """Gradients of biases are sums over all tokens."""
    return inner + 2 * part.stream * workload.spec.hidden if workload.spec.mlp_bias else 0.0


def of_micro_batch(layout: Layout) -> Layout:
    """What decides how a rank computes one micro batch of a layer and of the head: results are
    kept by it, and are the same for many layouts."""
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
    tp, cp, recompute = layout.tp, layout.cp, layout.recompute
    tokens = layout.micro_batch * workload.sample_tokens / cp
    part = Slice(tokens, tp, cp, 1, layout.sequence_parallel)
    split = context_split(workload, layout.exchange, tp, cp, tokens)
    stored = whole = _everything(workload, part, split)
    if recompute == "full":
        stored = _layer_input(workload, part)
    elif recompute == "selective" and workload.cost.selective == "products":
        stored = _every_second_product(workload, part, split, whole)
    elif recompute == "selective":
        stored = _without_scores(workload, split, whole)
    # The last recomputed layer is completely in memory again, together with the gradients.
    again = max(0.0, whole.total - stored.total)
    gradients = _gradients(workload, part, split, whole) + _changed_experts(workload)
    return Activations(stored, whole.total, again, gradients)


def _everything(workload: Workload, part: Slice, split: ContextSplit) -> LayerActivations:
    """Nothing is recomputed."""
    spec, kept = workload.spec, dict.fromkeys(LayerActivations._fields, 0.0)
    experts = _experts(workload, part) if spec.moe_layers else ()
    for op in (*operators(workload, part, split, experts=False), *experts):
        if op.kept:
            kept[op.part] += op.kept
    kept["mlp"] *= 1 - spec.moe_layers / spec.layers
    kept["experts"] = kept["experts"] * spec.moe_layers / spec.layers
    kept["experts"] += _changed_experts(workload)
    return LayerActivations(**kept)


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
    vectors and projects the result; in single operators a norm keeps its own copies of its
    input."""
    width = workload.width
    norm = EAGER_RMS_NORM_BYTES + width if _eager_norms(workload) else width
    return (norm + width) * workload.spec.latent * tokens


def _norm_bytes(workload: Workload) -> int:
    """What a norm keeps per element besides its output: its input; single operators their fp32
    copy of it and, if the weight trains, what it multiplies."""
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


def _kernel(workload: Workload, part: Slice) -> float:
    """What attention itself keeps between the query-key product and its output."""
    rows = part.tokens / part.tp * workload.spec.heads
    if workload.attention == "fused":  # FlashAttention, arXiv:2205.14135: fp32 row sums
        return FP32_BYTES * rows
    width, scores = workload.width, rows * workload.sequence_length
    if workload.attention == "eager":
        return eager(workload).kept.nbytes(width) * scores
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


def _layer_input(workload: Workload, part: Slice) -> LayerActivations:
    """Full recompute: the input of each layer (Korthikanti et al., table 2: 2·s·b·h)."""
    held = workload.width * part.stream * workload.spec.hidden
    return LayerActivations(held, 0.0, 0.0, 0.0, 0.0)


def _without_scores(
    workload: Workload, split: ContextSplit, whole: LayerActivations
) -> LayerActivations:
    """megatron-core's selective recompute of core attention (Korthikanti et al., section 5)."""
    width, qkv = workload.width, whole.qkv
    if workload.attention == "eager":  # keys and values are repeated again
        plain = split.query + 2 * split.key + _rotated(workload, split)
        qkv += width * (plain - _projected(workload, split))
    return whole._replace(qkv=qkv, attention=width * split.query)


def _every_second_product(
    workload: Workload, part: Slice, split: ContextSplit, whole: LayerActivations
) -> LayerActivations:
    """torchtitan's selective recompute per operator: attention and every second product.

    Of query, key, value, output, gate, up and down (or in and out), the odd ones are kept,
    and the output of each reduce-scatter of the tensor group.
    """
    spec, width = workload.spec, workload.width
    dense = 1 - spec.moe_layers / spec.layers
    scattered = 2 if part.tp > 1 else 0
    down = part.tokens * spec.hidden if spec.gated_mlp else 0.0
    return LayerActivations(
        norms=(1 + scattered) * width * part.stream * spec.hidden,
        qkv=width * (split.query + split.key),
        attention=width * split.query + _kernel(workload, part),
        mlp=dense * width * (_inner(workload, part) + down),
        experts=whole.experts,
    )


def _inner(workload: Workload, part: Slice) -> float:
    """Elements of an inner tensor of a dense MLP, or of experts if all layers have them."""
    spec, split = workload.spec, part.tokens / part.tp
    if spec.moe_layers == spec.layers:
        return split * spec.experts_per_token * spec.expert_intermediate
    return split * spec.intermediate


def _gradients(
    workload: Workload, part: Slice, split: ContextSplit, whole: LayerActivations
) -> float:
    """Gradients alive at once in a layer's backward: those of its largest part. What the MLP
    kept (of `whole`) is free when attention's are made."""
    spec, width, inner = workload.spec, workload.width, _inner(workload, part)
    mlp = width * (3 if spec.gated_mlp else 2) * inner
    scores = part.tokens / part.tp * spec.heads * workload.sequence_length
    around = width * 2 * part.tokens * spec.hidden
    if workload.attention == "eager":
        own = eager(workload).workspace.nbytes(width) * scores
        return around + max(mlp, width * 2 * split.query + own - whole.mlp - whole.experts)
    attention = 2 * (split.query + 2 * split.attended_key)
    if workload.attention == "unfused":
        attention += 2 * scores
    return around + max(mlp, width * attention)
