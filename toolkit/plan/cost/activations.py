"""Activations of one transformer layer that are kept for the backward pass, by part.

What is stored follows from autograd: a matrix product keeps its input, a norm its input, an
activation function its input, attention its query, key, value and output. In 16 bits and
without parallelism a GPT layer keeps 34·s·b·h bytes and 5·a·s²·b for unfused attention
(Korthikanti et al. 2022, arXiv:2205.05198, eq. 1); `tests/plan/test_memory.py` checks the
paper's equations 1 to 6 against this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from toolkit.layout import Exchange, Recompute, mlp_chunks
from toolkit.plan.cost.eager import eager
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.exchange import context_split
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
class _Sizes:
    """Elements of one layer on one rank."""

    stream: float
    """Of the residual stream."""
    whole_stream: float
    """Of the residual stream, gathered over the tensor group."""
    query: float
    key: float
    """Of the keys, equal to that of the values."""
    attended: float
    """The same of the keys that attention keeps: a context group's may be gathered."""
    output: float
    """Of attention's output before a context group sent its heads back."""
    scores: float
    rows: float
    """Rows of the score matrices: one softmax each."""
    inner: float
    """Of one inner tensor of a dense MLP, or of the experts if all layers have them."""


def layer_activations(
    workload: Workload, tp: int, cp: int, sequence: bool, micro: int, recompute: Recompute,
    exchange: Exchange = "all_gather",
) -> Activations:  # fmt: skip
    """What one micro batch of `micro` samples leaves on a rank per layer.

    `tp`, `cp`: tensor and context parallel degrees; `sequence`: sequence parallel.
    """
    sizes = _sizes(workload, tp, cp, sequence, micro, exchange)
    whole = _everything(workload, sizes, tp)
    stored = whole
    if recompute == "full":
        stored = mixed(_layer_input(workload, sizes), whole, workload.recomputed_layers)
    elif recompute == "selective" and workload.cost.selective == "products":
        stored = _every_second_product(workload, sizes, tp)
    elif recompute == "selective":
        stored = _without_scores(workload, sizes, whole)
    # The last recomputed layer is completely in memory again, together with the gradients.
    again = max(0.0, whole.total - _least(workload, sizes, stored, recompute))
    if workload.inputs_on_host:  # that of the next layer is on its way
        again += workload.width * sizes.stream
    gradients = _gradients(workload, sizes, whole) + _changed_experts(workload)
    return Activations(stored, whole.total, again, gradients)


def _least(
    workload: Workload, sizes: _Sizes, stored: LayerActivations, recompute: Recompute
) -> float:
    """What a recomputed layer keeps (not averaged with the others)."""
    return (_layer_input(workload, sizes) if recompute == "full" else stored).total


def _sizes(
    workload: Workload, tp: int, cp: int, sequence: bool, micro: int, exchange: Exchange
) -> _Sizes:
    spec = workload.spec
    tokens = micro * workload.sample_tokens / cp
    context = context_split(workload, exchange, tp, cp, tokens)
    split, of_heads = tokens / tp, tokens / workload.head_ranks(tp)
    inner = split * spec.intermediate
    if spec.moe_layers == spec.layers:
        inner = split * spec.experts_per_token * spec.expert_intermediate
    return _Sizes(
        stream=tokens * spec.hidden / (tp if sequence else 1),
        whole_stream=tokens * spec.hidden,
        query=context.query,
        key=context.key,
        attended=context.attended_key,
        output=context.kept,
        scores=of_heads * spec.heads * workload.sequence_length,
        rows=of_heads * spec.heads,
        inner=inner,
    )


def _everything(workload: Workload, sizes: _Sizes, tp: int) -> LayerActivations:
    """Nothing is recomputed."""
    spec, width = workload.spec, workload.width
    norms = spec.norms_per_layer * _norm_bytes(workload) * sizes.stream
    # Attention and MLP keep what they read. megatron-core gathers a norm's split output again
    # in the backward pass; torch's tensor parallel keeps it gathered.
    read = sizes.whole_stream if workload.cost.gathers_norms else sizes.stream
    norms += min(spec.norms_per_layer, 2) * width * read
    masks = 2 * MASK_BYTES * sizes.stream if workload.dropout else 0.0
    head_norms = sizes.query + sizes.key if spec.query_key_norm else 0.0
    dense = 1 - spec.moe_layers / spec.layers
    return LayerActivations(
        norms=norms + masks,
        qkv=width * _projected(workload, sizes)
        + _norm_bytes(workload) * head_norms
        + _latents(workload, sizes),
        attention=width * (sizes.query + sizes.output) + _kernel(workload, sizes),
        mlp=0.0 if workload.tiled_mlp else dense * _inner_bytes(workload, sizes),
        experts=_experts(workload, sizes, tp) + _changed_experts(workload),
    )


def _inner_bytes(workload: Workload, sizes: _Sizes) -> float:
    """What a dense MLP keeps between its linear layers."""
    return workload.width * _inner_tensors(workload) * sizes.inner


def _projected(workload: Workload, sizes: _Sizes) -> float:
    """Elements of queries, keys and values that attention keeps, and of plain ones."""
    spec = workload.spec
    if workload.attention == "eager" and (workload.megatron_layers or spec.grouped):
        return 3 * sizes.query  # copies, one of keys and of values per query head
    return sizes.query + 2 * sizes.attended + _rotated(workload, sizes)


def _rotated(workload: Workload, sizes: _Sizes) -> float:
    """Elements of rotated queries and keys in models where the values, a view of the fused
    product, also keep the unrotated ones: megatron-core's, and some of transformers'. GPT-NeoX
    also copies attention's output, but its two norms share their input."""
    spec = workload.spec
    rotary = not (spec.learned_positions or spec.latent)
    views = _single_megatron(workload) or (spec.fused_qkv and not workload.megatron_layers)
    return sizes.query + sizes.key if views and rotary else 0.0


def _single_megatron(workload: Workload) -> bool:
    """Whether these are megatron-core's layers of single operators."""
    return workload.megatron_layers and not workload.fused_elementwise


def _latents(workload: Workload, sizes: _Sizes) -> float:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) normalises the latent
    vectors and projects the result; in single operators a norm keeps its own copies of its
    input."""
    width = workload.width
    norm = EAGER_RMS_NORM_BYTES + width if _eager_norms(workload) else width
    return (norm + width) * workload.spec.latent * sizes.stream / workload.spec.hidden


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


def _kernel(workload: Workload, sizes: _Sizes) -> float:
    """What attention itself keeps between the query-key product and its output."""
    if workload.attention == "fused":  # FlashAttention, arXiv:2205.14135: fp32 row sums
        return FP32_BYTES * sizes.rows
    width = workload.width
    if workload.attention == "eager":
        return eager(workload).kept.nbytes(width) * sizes.scores
    per_score = width  # the softmax's output
    if workload.dropout:
        per_score += MASK_BYTES + width  # the mask, and the product's input
    if not workload.fused_elementwise and width < FP32_BYTES:
        per_score += FP32_BYTES  # the softmax in fp32, rounded afterwards
    return per_score * sizes.scores


def _inner_tensors(workload: Workload) -> int:
    """Tensors of the MLP's inner size that are kept.

    Plain (GELU, squared ReLU): input and output of the activation function. Gated: gate, up
    and the product; in single operators, also the activated gate, and of megatron-core's a
    copy of up (its `glu` adds an offset, 0).
    """
    if not workload.spec.gated_mlp:
        return 2
    if workload.fused_elementwise or workload.fused_glu:
        return 3
    return 5 if _single_megatron(workload) else 4


def _experts(workload: Workload, sizes: _Sizes, tp: int) -> float:
    """Tokens times experts per token, spread evenly over ranks: balanced routing.

    Kept are the dispatched tokens, the experts' inner tensors and outputs, and the router's
    fp32 probabilities; of shared experts, which all tokens pass through, the inner tensors.
    megatron-core's single operators scale the input of the last product by the probability, and
    also keep it unscaled.
    """
    spec, width = workload.spec, workload.width
    if not spec.moe_layers:
        return 0.0
    tokens = sizes.stream / spec.hidden
    pairs = tokens * spec.experts_per_token
    tensors = _inner_tensors(workload)
    inner = spec.experts_per_token * spec.expert_intermediate
    inner = (tensors + _single_megatron(workload)) * inner + tensors * spec.shared_intermediate
    kept = (
        2 * width * pairs * spec.hidden
        + width * inner * sizes.whole_stream / spec.hidden / tp
        + FP32_BYTES * tokens * spec.experts
    )
    return kept * spec.moe_layers / spec.layers


def _changed_experts(workload: Workload) -> float:
    """The weights of a layer's experts with their adapters added."""
    if not workload.adds_to_experts:
        return 0.0
    return workload.width * workload.spec.parameters.experts / workload.spec.layers


def _layer_input(workload: Workload, sizes: _Sizes) -> LayerActivations:
    """Full recompute: the input of each layer (Korthikanti et al., table 2: 2·s·b·h)."""
    held = 0.0 if workload.inputs_on_host else workload.width * sizes.stream
    return LayerActivations(held, 0.0, 0.0, 0.0, 0.0)


def _without_scores(
    workload: Workload, sizes: _Sizes, whole: LayerActivations
) -> LayerActivations:
    """megatron-core's selective recompute of core attention (Korthikanti et al., section 5)."""
    width = workload.width
    output, qkv = width * sizes.query, whole.qkv
    if workload.attention == "eager":  # keys and values are repeated again
        plain = sizes.query + 2 * sizes.key + _rotated(workload, sizes)
        qkv += width * (plain - _projected(workload, sizes))
    return LayerActivations(whole.norms, qkv, output, whole.mlp, whole.experts)


def _every_second_product(workload: Workload, sizes: _Sizes, tp: int) -> LayerActivations:
    """torchtitan's selective recompute per operator: attention and every second product.

    Of query, key, value, output, gate, up and down (or in and out), the odd ones are kept,
    and the output of each reduce-scatter of the tensor group.
    """
    spec, width = workload.spec, workload.width
    dense = 1 - spec.moe_layers / spec.layers
    scattered = 2 if tp > 1 else 0
    down = sizes.whole_stream if spec.gated_mlp else 0.0
    return LayerActivations(
        norms=(1 + scattered) * width * sizes.stream,
        qkv=width * (sizes.query + sizes.key),
        attention=width * sizes.query + _kernel(workload, sizes),
        mlp=dense * width * (sizes.inner + down),
        experts=_experts(workload, sizes, tp) + _changed_experts(workload),
    )


def _gradients(workload: Workload, sizes: _Sizes, whole: LayerActivations) -> float:
    """Gradients alive at once in a layer's backward: those of its largest part. What the MLP
    kept (of `whole`) is free when attention's are made."""
    width = workload.width
    products = 3 if workload.spec.gated_mlp else 2
    mlp = width * products * sizes.inner
    if workload.tiled_mlp:  # of one chunk, which is computed again
        mlp = (mlp + _inner_bytes(workload, sizes)) / mlp_chunks(sizes.stream)
    if workload.attention == "eager":
        scores = eager(workload).workspace.nbytes(width) * sizes.scores
        attention = width * 2 * sizes.query + scores - whole.mlp - whole.experts
        return width * 2 * sizes.whole_stream + max(mlp, attention)
    attention = 2 * (sizes.query + 2 * sizes.attended)
    if workload.attention == "unfused":
        attention += 2 * sizes.scores
    return width * 2 * sizes.whole_stream + max(mlp, width * attention)
