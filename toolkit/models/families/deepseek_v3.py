"""DeepSeek-V3 (arXiv:2412.19437): latent attention and experts chosen in groups.

Queries, and keys with values, are projected down to a latent vector, normalised, and up to the
heads again. A head has a part without positions, and one that is turned; of the keys, all heads
share the latter.
"""

from dataclasses import replace
from typing import Any

from toolkit.models.config_keys import keys_of
from toolkit.models.families import common, deepseek_experts, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import counted, sizes
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, whole
from toolkit.models.spec import ModelSpec

_LATENT_EPS = 1e-6
"""Of the norms of the latent vectors, whatever `rms_norm_eps` is."""
_YARN_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}


def shape(settings: Settings) -> ModelSpec:
    """The shape: `head_dim` is that of queries and keys, another than the values'."""
    size = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    heads = settings["num_attention_heads"]
    latent = (settings["q_lora_rank"] or 0) + settings["kv_lora_rank"]
    spec = replace(sizes(settings), head_dim=size, kv_heads=heads, latent=latent)
    spec = counted(settings, deepseek_experts.shape(spec, settings))
    assert spec.counted is not None
    scores = 2.0 * heads * (size + settings["v_head_dim"]) * spec.layers
    return replace(spec, counted=replace(spec.counted, score_flops=scores))


def attention_tensors(spec: ModelSpec, settings: Settings) -> list[TensorMap]:
    """The norms of a layer and of its latent vectors, and the projections of attention."""
    hidden, heads = spec.hidden, spec.heads
    latent, turned = settings["kv_lora_rank"], settings["qk_rope_head_dim"]
    values = heads * settings["v_head_dim"]
    keys = heads * settings["qk_nope_head_dim"]
    theirs, ours = f"{llama.HF_LAYER}.self_attn", f"{llama.LAYER}.self_attention"
    tensors = llama.layer_norms(spec, settings)
    tensors += _query_tensors(spec, settings["q_lora_rank"], theirs, ours)
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


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """DeepSeek-V3 as a megatron-core GPTModel."""
    fields = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": settings["q_lora_rank"],
        "kv_lora_rank": settings["kv_lora_rank"],
        "qk_head_dim": settings["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": settings["qk_rope_head_dim"],
        "v_head_dim": settings["v_head_dim"],
    }
    plain = deepseek_experts.model(spec, settings, attention_tensors(spec, settings))
    gpt = {name: value for name, value in plain.gpt.items() if name != "rope_parameters"}
    fields |= {"rotary_base": gpt["rotary_base"], **_scaling(settings)}
    return replace(plain, transformer={**plain.transformer, **fields}, gpt=gpt)


def _scaling(settings: Settings) -> dict[str, Any]:
    """TransformerConfig fields of the positions: plain, or YaRN (arXiv:2309.00071)."""
    rope = common.rope_of(settings)
    if common.rope_type_of(rope) != "yarn":
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


def unsupported_positions(settings: Settings) -> str | None:
    """Why megatron-core cannot turn positions as this config says; None when it can."""
    rope = common.rope_of(settings)
    rope_type = common.rope_type_of(rope)
    if not settings["rope_interleave"]:
        return "megatron-core's latent attention turns interleaved pairs (rope_interleave)"
    if rope_type not in ("default", "yarn"):
        return f"megatron-core's latent attention has no rope_type {rope_type}"
    if rope_type == "yarn":
        if ("mscale" in rope) != ("mscale_all_dim" in rope):
            return "megatron-core's YaRN needs both mscale and mscale_all_dim, or neither"
        if "attention_factor" in rope or rope.get("truncate") is False:
            return "megatron-core's YaRN has no attention_factor and truncate: false"
    return None


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this deepseek_v3; None when it can."""
    latent = None
    if settings["attention_bias"]:
        latent = "megatron-core's latent attention has no biases"
    elif settings["rms_norm_eps"] != _LATENT_EPS:
        latent = (
            f"transformers' norms of latent vectors have eps {_LATENT_EPS}, megatron-core's "
            "that of the other norms (rms_norm_eps)"
        )
    elif not spec.moe_layers:
        latent = "latent attention is exact under tensor parallel with sequence parallel \
alone, which a model without experts does not need"
    return common.first_reason(
        latent,
        unsupported_positions(settings),
        deepseek_experts.unsupported_router(spec, settings),
        common.unsupported_activation(settings),
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    # transformers computes and saves the sizes of heads; it reads pretraining_tp nowhere.
    keys_of("deepseek_v3", head_dim=None, qk_head_dim=None),
    model,
    unsupported,
    aliases=deepseek_experts.ALIASES,
    standard=deepseek_experts.STANDARD,
    shape=shape,
)
