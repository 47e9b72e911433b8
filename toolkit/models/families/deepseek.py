"""DeepSeek-V3 (arXiv:2412.19437): latent attention and experts chosen in groups; and GLM-4.5,
which is llama with these experts.

Queries, and keys with values, are projected down to a latent vector, normalised, and up to the
heads again. A head has a part without positions, and one that is turned; of the keys, all heads
share the latter.

A token's score of an expert is the sigmoid of its logit (section 2.1.2). The experts are chosen
by score plus a correction bias, which no gradient trains, among the best groups of experts; the
chosen ones' scores without the bias, normalised to a sum of 1 and scaled, weight their outputs.
Every token passes through the shared experts as well. The first layers are dense.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolkit.models.families import common, llama
from toolkit.models.families.base import MegatronModel
from toolkit.models.families.mixtures import (
    expert_tensors,
    mixture,
    refusing,
    shared_expert_tensors,
)
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, whole
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec

_LATENT_EPS = 1e-6
"""Of the norms of the latent vectors, whatever `rms_norm_eps` is."""
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}


def glm4_moe(config: Config, spec: ModelSpec) -> MegatronModel:
    """GLM-4.5 as a megatron-core GPTModel."""
    return refusing(_with_experts(config, spec), _router_reason(config, spec))


def deepseek_v3(config: Config, spec: ModelSpec) -> MegatronModel:
    """DeepSeek-V3 as a megatron-core GPTModel."""
    fields = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
    }
    plain = _with_experts(config, spec, _latent_attention(config, spec))
    gpt = {name: value for name, value in plain.gpt.items() if name != "rope_parameters"}
    fields |= {"rotary_base": gpt["rotary_base"], **_scaling(config)}
    model = replace(plain, transformer={**plain.transformer, **fields}, gpt=gpt)
    return refusing(
        replace(model, unsupported=common.activation_reason(config)),
        _latent_reason(config, spec),
        _router_reason(config, spec),
    )


def _latent_attention(config: Config, spec: ModelSpec) -> list[TensorMap]:
    """The norms of a layer and of its latent vectors, and the projections of attention."""
    hidden, heads = spec.hidden, spec.heads
    latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    values = heads * config["v_head_dim"]
    keys = heads * config["qk_nope_head_dim"]
    theirs, ours = f"{llama.HF_LAYER}.self_attn", f"{llama.LAYER}.self_attention"
    tensors = llama.layer_norms(spec)
    tensors += _query_tensors(spec, config["q_lora_rank"], theirs, ours)
    down, up = f"{theirs}.kv_a_proj_with_mqa.weight", f"{theirs}.kv_b_proj.weight"
    return [
        *tensors,
        whole(f"{ours}.linear_kv_down_proj.weight", down, latent + turned, hidden),
        whole(f"{ours}.kv_layernorm.weight", f"{theirs}.kv_a_layernorm.weight", latent),
        by_rows(f"{ours}.linear_kv_up_proj.weight", up, keys + values, latent),
        by_columns(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", hidden, values),
    ]


def _query_tensors(
    spec: ModelSpec, latent: int | None, theirs: str, ours: str
) -> list[TensorMap]:
    """Queries by way of a latent vector of that size; None: projected at once."""
    rows, hidden = spec.heads * spec.head_dim, spec.hidden
    if latent is None:
        return [
            by_rows(f"{ours}.linear_q_proj.weight", f"{theirs}.q_proj.weight", rows, hidden)
        ]
    down, up = f"{theirs}.q_a_proj.weight", f"{theirs}.q_b_proj.weight"
    return [
        whole(f"{ours}.linear_q_down_proj.weight", down, latent, hidden),
        whole(f"{ours}.q_layernorm.weight", f"{theirs}.q_a_layernorm.weight", latent),
        by_rows(f"{ours}.linear_q_up_proj.weight", up, rows, latent),
    ]


def _scaling(config: Config) -> dict[str, Any]:
    """TransformerConfig fields of the positions: plain, or YaRN (arXiv:2309.00071)."""
    rope = common.rope_of(config)
    if common.rope_type_of(config) != "yarn":
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    stated = {name: rope[name] for name in ("mscale", "mscale_all_dim") if name in rope}
    betas = {name: rope.get(name, value) for name, value in _YARN_DEFAULTS.items()}
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        **betas,
        **stated,
    }


def _latent_reason(config: Config, spec: ModelSpec) -> str | None:
    """Why megatron-core's latent attention cannot compute this config."""
    rope, rope_type = common.rope_of(config), common.rope_type_of(config)
    reason = None
    if config["attention_bias"]:
        reason = "has no biases"
    elif config["rms_norm_eps"] != _LATENT_EPS:
        reason = (
            "has the eps of the other norms (rms_norm_eps) in norms of latent vectors, "
            f"transformers {_LATENT_EPS}"
        )
    elif not spec.moe_layers:
        reason = (
            "is exact under tensor parallel with sequence parallel alone, which a model "
            "without experts does not need"
        )
    elif not config["rope_interleave"]:
        reason = "turns interleaved pairs (rope_interleave)"
    elif rope_type not in ("default", "yarn"):
        reason = f"has no rope_type {rope_type}"
    elif rope_type == "yarn" and ("mscale" in rope) != ("mscale_all_dim" in rope):
        reason = "needs both mscale and mscale_all_dim of YaRN, or neither"
    elif rope.get("attention_factor") or rope.get("truncate") is False:
        reason = "has no attention_factor and truncate: false of YaRN"
    return reason and f"megatron-core's latent attention {reason}"


def _with_experts(
    config: Config, spec: ModelSpec, attention: Sequence[TensorMap] | None = None
) -> MegatronModel:
    """A decoder with these experts as a megatron-core GPTModel; its attention is llama's unless
    given."""
    layers = frozenset(range(config["first_k_dense_replace"], spec.layers))
    inner = config["n_shared_experts"] * config["moe_intermediate_size"]
    shared = f"{llama.HF_LAYER}.mlp.shared_experts"
    experts = [*expert_tensors(spec), *shared_expert_tensors(spec.hidden, inner, shared)]
    fields = _router(config) | {"moe_shared_expert_intermediate_size": inner}
    router = f"{llama.HF_LAYER}.mlp.gate.e_score_correction_bias"
    bias = whole(f"{llama.LAYER}.mlp.router.expert_bias", router, spec.experts)
    plain = mixture(config, spec, layers, experts, fields, attention)
    return replace(plain, buffers=(bias,) if layers else ())


def _router(config: Config) -> dict[str, Any]:
    """TransformerConfig fields of the choice of experts."""
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
    }
    if _is_limited(config):
        fields["moe_router_num_groups"] = config["n_group"]
        fields["moe_router_group_topk"] = config["topk_group"]
    return fields


def _is_limited(config: Config) -> bool:
    """Is there a group of experts that a token cannot choose?"""
    return bool(config["topk_group"] < config["n_group"])


def _router_reason(config: Config, spec: ModelSpec) -> str | None:
    """Why megatron-core cannot choose and weight experts as this config says."""
    chosen, groups = spec.experts_per_token, config["topk_group"]
    if not spec.moe_layers:
        return None
    if config["norm_topk_prob"] != (chosen > 1):
        return (
            "megatron-core normalises the sigmoid scores of several experts per token, and "
            "those of one expert per token never"
        )
    if _is_limited(config) and chosen // groups != 2:
        return (
            "megatron-core ranks groups of experts by their best num_experts_per_tok // "
            f"topk_group ({chosen} // {groups}), transformers by their best two"
        )
    return None
