"""Llama: pre-norm decoder with RMSNorm, rotary positions, grouped queries and a gated MLP.

Its layers and tensor names are the common ones of today. The dense families that differ from it
in keys and traits alone are rows here; mixtures build on this file, too.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from toolkit.models.families import common
from toolkit.models.families.base import NORMS, Family, MegatronModel, Norms
from toolkit.models.families.tensors import (
    TensorMap,
    by_columns,
    fused_qkv,
    gated,
    whole,
)
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec

LAYER = "decoder.layers.{layer}"
HF_LAYER = "model.layers.{layer}"
GATE_UP_DOWN = ("gate", "up", "down")


def attention_tensors(
    spec: ModelSpec, norms: Mapping[str, str] = NORMS, *, norms_over_width: bool = False
) -> list[TensorMap]:
    """A layer's norms, and projections and (where the family has them) biases and head norms of
    attention."""
    return [
        *layer_norms(spec, norms),
        *_projections(spec),
        *_query_key_norms(spec, norms_over_width),
    ]


def layer_norms(spec: ModelSpec, norms: Mapping[str, str] = NORMS) -> list[TensorMap]:
    """The norms of a layer: megatron-core's names inside it, each with the checkpoint's."""
    return [
        whole(f"{LAYER}.{ours}.weight", f"{HF_LAYER}.{theirs}.weight", spec.hidden)
        for ours, theirs in norms.items()
    ]


def _query_key_norms(spec: ModelSpec, over_width: bool) -> list[TensorMap]:
    """The norms of queries and keys, over each head or over all heads together."""
    heads = {"q": spec.heads, "k": spec.kv_heads} if spec.query_key_norm else {}
    return [
        whole(
            f"{LAYER}.self_attention.{part}_layernorm.weight",
            f"{HF_LAYER}.self_attn.{part}_norm.weight",
            spec.head_dim * (number if over_width else 1),
        )
        for part, number in heads.items()
    ]


def _projections(spec: ModelSpec) -> list[TensorMap]:
    """Query, key, value and output projection, and their biases."""
    heads, hidden = common.heads_of(spec), spec.hidden
    attention = f"{HF_LAYER}.self_attn"
    megatron = f"{LAYER}.self_attention"
    parts = ("qkv", "qkv", "qkv") if spec.fused_qkv else ("q", "k", "v")
    q, k, v = (f"{attention}.{part}_proj" for part in parts)
    weights = f"{q}.weight", f"{k}.weight", f"{v}.weight"
    tensors = [
        fused_qkv(f"{megatron}.linear_qkv.weight", weights, heads, hidden),
        by_columns(
            f"{megatron}.linear_proj.weight",
            f"{attention}.o_proj.weight",
            hidden,
            spec.heads * spec.head_dim,
        ),
    ]
    if spec.qkv_bias:
        biases = f"{q}.bias", f"{k}.bias", f"{v}.bias"
        tensors.append(fused_qkv(f"{megatron}.linear_qkv.bias", biases, heads, None))
    if spec.attention_output_bias:
        name = f"{attention}.o_proj.bias"
        tensors.append(whole(f"{megatron}.linear_proj.bias", name, hidden))
    return tensors


def gated_mlp(
    hidden: int, inner: int, megatron: str, name: str, parts: Sequence[str] = GATE_UP_DOWN
) -> list[TensorMap]:
    """The matrices of an MLP that megatron-core and checkpoints call so: gate and up fused, and
    down."""
    gate, up, down = (f"{name}.{part}_proj.weight" for part in parts)
    return [
        gated(f"{megatron}.linear_fc1.weight", gate, up, inner, hidden),
        by_columns(f"{megatron}.linear_fc2.weight", down, hidden, inner),
    ]


def mlp_tensors(
    spec: ModelSpec, name: str = f"{HF_LAYER}.mlp", *, fused: bool = False
) -> list[TensorMap]:
    """The dense MLP of a layer, which checkpoints call `name`, and its biases; `fused`: they
    hold gate and up in one tensor."""
    hidden, inner, megatron = spec.hidden, spec.intermediate, f"{LAYER}.mlp"
    parts = ("gate_up", "gate_up", "down") if fused else GATE_UP_DOWN
    tensors = gated_mlp(hidden, inner, megatron, name, parts)
    if spec.mlp_bias:
        gate, up, down = (f"{name}.{part}_proj.bias" for part in parts)
        tensors += [
            gated(f"{megatron}.linear_fc1.bias", gate, up, inner, None),
            whole(f"{megatron}.linear_fc2.bias", down, hidden),
        ]
    return tensors


def outer_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Embedding, final norm and output projection."""
    return common.outer_tensors(spec, "model.embed_tokens", "model.norm")


def model(
    config: Config,
    spec: ModelSpec,
    *,
    norms: Mapping[str, str] = NORMS,
    norms_over_width: bool = False,
    fused_gate_up: bool = False,
    interleaved: bool = False,
    gemma: bool = False,
) -> MegatronModel:
    """Llama, or a dense family with its layers, as a megatron-core GPTModel.

    `gemma`: norms of weight 1 + w, and scaled embeddings.
    """
    fields = common.transformer(config, spec) | _scores(config)
    if interleaved:
        fields["rotary_interleaved"] = True
    if gemma:
        fields["layernorm_zero_centered_gamma"] = True
    return MegatronModel(
        fields,
        common.gpt(config, spec),
        (
            *outer_tensors(spec),
            *attention_tensors(spec, norms, norms_over_width=norms_over_width),
            *mlp_tensors(spec, fused=fused_gate_up),
        ),
        norms=_placement(norms),
        norms_over_width=norms_over_width,
        score_cap=config["attn_logit_softcapping"],
        logit_cap=config["final_logit_softcapping"],
        embedding_scale=spec.hidden**0.5 if gemma else config["embedding_multiplier"] or 1.0,
        residual_scale=config["residual_multiplier"] or 1.0,
        logits_divisor=config["logits_scaling"] or 1.0,
        padding_token=common.padding_token(config, spec),
        unsupported=unsupported(config, spec),
    )


def _scores(config: Config) -> dict[str, Any]:
    """TransformerConfig fields of the factor of attention scores, if it is not 1/√head_dim."""
    scale = config["attention_multiplier"]
    if (size := config["query_pre_attn_scalar"]) is not None:
        scale = size**-0.5
    return {} if scale is None else {"softmax_scale": scale}


def _placement(norms: Mapping[str, str]) -> Norms:
    after = "self_attn_bda.norm" in norms
    if "input_layernorm" not in norms:
        return "after"
    return "both" if after else "before"


def unsupported(config: Config, spec: ModelSpec) -> str | None:
    """Why megatron-core cannot compute this model; None when it can."""
    if config["resid_pdrop"]:
        return "resid_pdrop: megatron-core's dropout of the residual also drops embeddings"
    return common.bias_reason(spec) or common.activation_reason(config)


_OLMO_NORMS = {
    "self_attn_bda.norm": "post_attention_layernorm",
    "mlp_bda.norm": "post_feedforward_layernorm",
}
_GLM4_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attn_bda.norm": "post_self_attn_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp_bda.norm": "post_mlp_layernorm",
}
_GEMMA_NORMS = {
    "input_layernorm": "input_layernorm",
    "self_attn_bda.norm": "post_attention_layernorm",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "mlp_bda.norm": "post_feedforward_layernorm",
}
_GEMMA = partial(model, norms=_GEMMA_NORMS, gemma=True)
_OLMO = partial(model, norms=_OLMO_NORMS, norms_over_width=True)
LLAMA_LIKE: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"), model),
    "phi3": partial(model, fused_gate_up=True),
    "glm4": partial(model, norms=_GLM4_NORMS, fused_gate_up=True, interleaved=True),
    **dict.fromkeys(("olmo2", "olmo3"), _OLMO),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA),
}
