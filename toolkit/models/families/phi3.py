"""Phi-3 and Phi-4: llama whose checkpoints hold query, key and value as one tensor, and gate
and up as one."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import (
    DROPOUT,
    POSITIVE_FLOAT,
    SIZE,
    TOKEN,
    TOKENS,
    UNIT_FLOAT,
    Key,
    Kind,
    without,
)
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.tensors import TensorMap, fused_qkv, gated
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **without(llama.KEYS, "pretraining_tp", "mlp_bias", "head_dim"),
    "vocab_size": Key(SIZE, 32064),
    "hidden_size": Key(SIZE, 3072),
    "intermediate_size": Key(SIZE, 8192),
    "attention_bias": Key(Kind("false (phi3 has no biases)", lambda v: v is False), False),
    "resid_pdrop": Key(DROPOUT, 0.0),
    "embd_pdrop": Key(DROPOUT, 0.0),
    "max_position_embeddings": Key(SIZE, 4096),
    "original_max_position_embeddings": Key(SIZE, 4096),
    "partial_rotary_factor": Key(UNIT_FLOAT, 1.0),
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1e-5),
    "eos_token_id": Key(TOKENS, 32000, nullable=True),
    "pad_token_id": Key(TOKEN, 32000, nullable=True),
    "sliding_window": Key(SIZE, nullable=True),
}


def _fused_tensors(spec: ModelSpec) -> list[TensorMap]:
    """megatron-core's two fused matrices, of one checkpoint tensor each."""
    hidden, inner = spec.hidden, spec.intermediate
    qkv = f"{llama.HF_LAYER}.self_attn.qkv_proj.weight"
    gate_up = f"{llama.HF_LAYER}.mlp.gate_up_proj.weight"
    return [
        fused_qkv(
            f"{llama.LAYER}.self_attention.linear_qkv.weight",
            (qkv, qkv, qkv),
            common.heads_of(spec),
            hidden,
        ),
        gated(f"{llama.LAYER}.mlp.linear_fc1.weight", gate_up, gate_up, inner, hidden),
    ]


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Phi-3 as a megatron-core GPTModel."""
    plain = llama.model(spec, settings)
    fused = {tensor.name: tensor for tensor in _fused_tensors(spec)}
    share = settings["partial_rotary_factor"]
    gpt = {**plain.gpt, **common.rotary(settings, share=share)}
    tensors = tuple(fused.get(tensor.name, tensor) for tensor in plain.tensors)
    return replace(plain, gpt=gpt, tensors=tensors)


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this phi3; None when it can."""
    dropouts = None
    if common.dropout(settings, "resid_pdrop"):
        dropouts = "resid_pdrop: megatron-core's dropout of the residual also drops embeddings"
    return common.first_reason(dropouts, llama.unsupported(spec, settings))


PHI3 = Family(
    "phi3", KEYS, model, unsupported, rope_types=("default", "longrope"), fused_qkv=True
)
