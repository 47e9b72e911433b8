"""Llama: pre-norm decoder with RMSNorm, rotary positions, grouped queries and a gated MLP.

Its layers and tensor names are the common ones of today: the families that share them
(mistral, qwen2, qwen3, and mixtral and qwen3_moe outside their experts) build on this file.
"""

from collections.abc import Mapping
from typing import Any

from toolkit.models.config_keys import (
    ACTIVATION,
    DROPOUT,
    FLAG,
    GENERIC,
    POSITIVE_FLOAT,
    ROPE,
    SIZE,
    TOKEN,
    TOKENS,
    Key,
)
from toolkit.models.families import common
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.tensors import (
    TensorMap,
    by_columns,
    fused_qkv,
    gated,
    whole,
)
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **GENERIC,
    **ROPE,
    "vocab_size": Key(SIZE, 32000),
    "hidden_size": Key(SIZE, 4096),
    "intermediate_size": Key(SIZE, 11008),
    "num_hidden_layers": Key(SIZE, 32),
    "num_attention_heads": Key(SIZE, 32),
    "num_key_value_heads": Key(SIZE, nullable=True),
    "head_dim": Key(SIZE, nullable=True),
    "hidden_act": Key(ACTIVATION, "silu"),
    "max_position_embeddings": Key(SIZE, 2048),
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1e-6),
    "bos_token_id": Key(TOKEN, 1, nullable=True),
    "eos_token_id": Key(TOKENS, 2, nullable=True),
    "pretraining_tp": Key(SIZE, 1, nullable=True),
    "attention_bias": Key(FLAG, False),
    "attention_dropout": Key(DROPOUT, 0.0),
    "mlp_bias": Key(FLAG, False),
}

LAYER = "decoder.layers.{layer}"
HF_LAYER = "model.layers.{layer}"
NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
"""A layer's norms: megatron-core's names inside it, each with the checkpoint's."""


def attention_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Norm, projections and (where the family has them) biases and head norms of attention."""
    sizes = {"q": spec.head_dim, "k": spec.head_dim} if spec.query_key_norm else {}
    return [
        *layer_norms(spec, NORMS), *projections(spec), *query_key_norms(sizes),
    ]  # fmt: skip


def layer_norms(spec: ModelSpec, names: Mapping[str, str]) -> list[TensorMap]:
    """The norms of a layer: megatron-core's names inside it, each with the checkpoint's."""
    return [
        whole(f"{LAYER}.{ours}.weight", f"{HF_LAYER}.{theirs}.weight", spec.hidden)
        for ours, theirs in names.items()
    ]


def query_key_norms(sizes: Mapping[str, int]) -> list[TensorMap]:
    """The norms of `q` and `k`, of these sizes."""
    return [
        whole(
            f"{LAYER}.self_attention.{part}_layernorm.weight",
            f"{HF_LAYER}.self_attn.{part}_norm.weight",
            size,
        )
        for part, size in sizes.items()
    ]


def projections(spec: ModelSpec) -> list[TensorMap]:
    """Query, key, value and output projection, and their biases."""
    heads, hidden = common.heads_of(spec), spec.hidden
    attention = f"{HF_LAYER}.self_attn"
    megatron = f"{LAYER}.self_attention"
    q, k, v = (f"{attention}.{part}_proj" for part in "qkv")
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


def mlp_tensors(spec: ModelSpec, mlp: str = f"{HF_LAYER}.mlp") -> list[TensorMap]:
    """Gate and up fused, down, and their biases, of what checkpoints call `mlp`."""
    hidden, inner, megatron = spec.hidden, spec.intermediate, f"{LAYER}.mlp"
    gate, up, down = (f"{mlp}.{part}_proj" for part in ("gate", "up", "down"))
    tensors = [
        gated(f"{megatron}.linear_fc1.weight", f"{gate}.weight", f"{up}.weight", inner, hidden),
        by_columns(f"{megatron}.linear_fc2.weight", f"{down}.weight", hidden, inner),
    ]
    if spec.mlp_bias:
        tensors += [
            gated(f"{megatron}.linear_fc1.bias", f"{gate}.bias", f"{up}.bias", inner, None),
            whole(f"{megatron}.linear_fc2.bias", f"{down}.bias", hidden),
        ]
    return tensors


def outer_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Embedding, final norm and output projection."""
    return common.outer_tensors(spec, "model.embed_tokens", "model.norm")


def decoder_tensors(spec: ModelSpec) -> tuple[TensorMap, ...]:
    """Every tensor of a dense decoder with llama's names."""
    return (*outer_tensors(spec), *attention_tensors(spec), *mlp_tensors(spec))


def decoder_transformer(spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    """TransformerConfig fields of a decoder whose config has llama's keys."""
    fields = {
        "layernorm_epsilon": settings["rms_norm_eps"],
        "activation_func": common.HF_ACTIVATIONS.get(settings["hidden_act"]),
        "attention_dropout": common.dropout(settings, "attention_dropout"),
    }
    return common.transformer(spec) | fields | common.sliding_window(settings)


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Llama, or a dense family with its layers, as a megatron-core GPTModel."""
    gpt = common.gpt(spec) | common.rotary(settings)
    return MegatronModel(decoder_transformer(spec, settings), gpt, decoder_tensors(spec))


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this model; None when it can."""
    return common.first_reason(
        common.unsupported_biases(spec),
        common.unsupported_activation(settings["hidden_act"]),
    )


LLAMA = Family("llama", KEYS, model, unsupported, strict_heads=True)
