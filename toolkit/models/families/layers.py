"""Tensors of a decoder: which checkpoint tensors the parts of megatron-core's layers are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.models.families.base import Norms
from toolkit.models.families.tensors import (
    TensorMap,
    by_columns,
    by_rows,
    fused_qkv,
    gated,
    whole,
)
from toolkit.models.spec import ModelSpec

LAYER = "decoder.layers.{layer}"
"""megatron-core's name of a layer."""
NORMS: Mapping[str, str] = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
"""A layer's norms in most families: megatron-core's names inside it, each with the
checkpoint's."""


@dataclass(frozen=True)
class Names:
    """A checkpoint's names. By default llama's."""

    layer: str = "model.layers.{layer}"
    embedding: str = "model.embed_tokens"
    positions: str = ""
    """Learned ones."""
    final_norm: str = "model.norm"
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    attention: str = "self_attn"
    qkv: Sequence[str] = ("q_proj", "k_proj", "v_proj")
    """One name three times: a tensor that holds them one after the other. One name: in
    megatron-core's own order."""
    output: str = "o_proj"
    mlp: str = "mlp"
    up: Sequence[str] = ("gate_proj", "up_proj")
    """Gate and up projection, one name twice if one tensor holds both. Without a gate, the
    MLP's up projection."""
    down: str = "down_proj"
    transposed: bool = False
    """Matrices are stored [in, out]."""

    @property
    def norm_places(self) -> Norms:
        """Where a layer has norms."""
        if "input_layernorm" not in self.norms:
            return "after"
        return "both" if "self_attn_bda.norm" in self.norms else "before"


LLAMA = Names()


def outer_tensors(spec: ModelSpec, names: Names = LLAMA) -> list[TensorMap]:
    """Embeddings, final norm and, where it is not tied, the output projection."""
    hidden, vocab = spec.hidden, spec.vocab
    words = "embedding.word_embeddings.weight"
    tensors = [by_rows(words, f"{names.embedding}.weight", vocab, hidden, padded=True)]
    if names.positions:
        name = "embedding.position_embeddings.weight"
        tensors.append(whole(name, f"{names.positions}.weight", spec.max_positions, hidden))
    tensors += _norm(spec, "decoder.final_layernorm", names.final_norm)
    if not spec.tied_embeddings:
        head = by_rows("output_layer.weight", "lm_head.weight", vocab, hidden, padded=True)
        tensors.append(head)
    return tensors


def layer_norms(spec: ModelSpec, names: Names = LLAMA) -> list[TensorMap]:
    """The norms of a layer."""
    return [
        tensor
        for ours, theirs in names.norms.items()
        for tensor in _norm(spec, f"{LAYER}.{ours}", f"{names.layer}.{theirs}")
    ]


def _norm(spec: ModelSpec, ours: str, theirs: str) -> list[TensorMap]:
    parts = ("weight", "bias") if spec.layer_norm else ("weight",)
    return [whole(f"{ours}.{part}", f"{theirs}.{part}", spec.hidden) for part in parts]


def attention_tensors(
    spec: ModelSpec, names: Names = LLAMA, *, norms_over_width: bool = False
) -> list[TensorMap]:
    """Projections and (where the family has them) biases and head norms of attention."""
    ours, theirs = f"{LAYER}.self_attention", f"{names.layer}.{names.attention}"
    output, hidden = f"{theirs}.{names.output}", spec.hidden
    tensors = [
        _qkv(spec, names, f"{ours}.linear_qkv", theirs, "weight", hidden),
        by_columns(
            f"{ours}.linear_proj.weight",
            f"{output}.weight",
            hidden,
            spec.heads * spec.head_dim,
            transposed=names.transposed,
        ),
    ]
    if spec.qkv_bias:
        tensors.append(_qkv(spec, names, f"{ours}.linear_qkv", theirs, "bias", None))
    if spec.attention_output_bias:
        tensors.append(whole(f"{ours}.linear_proj.bias", f"{output}.bias", hidden))
    heads = {"q": spec.heads, "k": spec.kv_heads} if spec.query_key_norm else {}
    return tensors + [
        whole(
            f"{ours}.{part}_layernorm.weight",
            f"{theirs}.{part}_norm.weight",
            spec.head_dim * (number if norms_over_width else 1),
        )
        for part, number in heads.items()
    ]


def _qkv(
    spec: ModelSpec, names: Names, ours: str, theirs: str, part: str, columns: int | None
) -> TensorMap:
    """The weight or bias of queries, keys and values."""
    stored = [f"{theirs}.{name}.{part}" for name in names.qkv]
    if len(stored) == 1:
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        return by_rows(f"{ours}.{part}", stored[0], rows, columns)
    q, k, v = stored
    heads = spec.heads, spec.kv_heads, spec.head_dim
    transposed = names.transposed and columns is not None
    return fused_qkv(f"{ours}.{part}", (q, k, v), heads, columns, transposed=transposed)


def dense_mlp(spec: ModelSpec, names: Names = LLAMA) -> list[TensorMap]:
    """The dense MLP of a layer, and its biases."""
    place = f"{LAYER}.mlp", f"{names.layer}.{names.mlp}"
    return mlp_tensors(spec.hidden, spec.intermediate, place, names, biases=spec.mlp_bias)


def mlp_tensors(
    hidden: int,
    inner: int,
    place: tuple[str, str],
    names: Names = LLAMA,
    *,
    biases: bool = False,
) -> list[TensorMap]:
    """The tensors of an MLP at this place in megatron-core's model, and in a checkpoint."""
    ours, theirs = place
    first, second = f"{ours}.linear_fc1", f"{ours}.linear_fc2"
    down, turned = f"{theirs}.{names.down}", names.transposed

    def up(part: str, columns: int | None) -> TensorMap:
        stored = [f"{theirs}.{name}.{part}" for name in names.up]
        if len(stored) == 2:
            return gated(f"{first}.{part}", stored[0], stored[1], inner, columns)
        transposed = turned and columns is not None
        return by_rows(f"{first}.{part}", stored[0], inner, columns, transposed=transposed)

    tensors = [
        up("weight", hidden),
        by_columns(f"{second}.weight", f"{down}.weight", hidden, inner, transposed=turned),
    ]
    if biases:
        tensors += [up("bias", None), whole(f"{second}.bias", f"{down}.bias", hidden)]
    return tensors
