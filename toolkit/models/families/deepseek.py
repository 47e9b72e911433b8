"""DeepSeek-V3 (arXiv:2412.19437): latent attention, with the experts of `corrected_mixture`.

Queries, and keys with values, are projected down to a latent vector, normalised, and up to the
heads again. A head has a part without positions, and one that is turned; of the keys, all heads
share the latter.
"""

from collections.abc import Iterator
from dataclasses import replace

from toolkit.models.families import arguments
from toolkit.models.families.base import MegatronModel
from toolkit.models.families.layers import LAYER, LLAMA
from toolkit.models.families.mixtures import corrected_mixture
from toolkit.models.families.tensors import TensorMap, by_columns, by_rows, whole
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec

_LATENT_EPS = 1e-6
"""Epsilon of the norms of the latent vectors, whatever `rms_norm_eps` is."""


def deepseek_v3(config: Config, spec: ModelSpec) -> MegatronModel:
    """DeepSeek-V3 as a megatron-core GPTModel."""
    attention, reasons = _latent_attention(config, spec), _latent_reasons(config, spec)
    plain = corrected_mixture(config, spec, attention=attention, reasons=reasons)
    scaled = arguments.rope_type_of(config) != "default"
    rope = arguments.rope_of(config) if scaled else {}
    fields = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
        "rope_type": "rope",
        # Two factors of the scores; the angles are transformers'.
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim") or 0.0,
    }
    return replace(plain, transformer={**plain.transformer, **fields})


def _latent_attention(config: Config, spec: ModelSpec) -> list[TensorMap]:
    """The norms of latent vectors, and the projections of attention."""
    hidden, heads = spec.hidden, spec.heads
    latent, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    values, keys = heads * config["v_head_dim"], heads * config["qk_nope_head_dim"]
    queries, query_latent = heads * spec.head_dim, config["q_lora_rank"]
    theirs, ours = f"{LLAMA.layer}.self_attn", f"{LAYER}.self_attention"
    if query_latent is None:
        name = f"{ours}.linear_q_proj.weight"
        tensors = [by_rows(name, f"{theirs}.q_proj.weight", queries, hidden)]
    else:
        down, up = f"{theirs}.q_a_proj.weight", f"{theirs}.q_b_proj.weight"
        norm = f"{theirs}.q_a_layernorm.weight"
        tensors = [
            whole(f"{ours}.linear_q_down_proj.weight", down, query_latent, hidden),
            whole(f"{ours}.q_layernorm.weight", norm, query_latent),
            by_rows(f"{ours}.linear_q_up_proj.weight", up, queries, query_latent),
        ]
    down, up = f"{theirs}.kv_a_proj_with_mqa.weight", f"{theirs}.kv_b_proj.weight"
    norm, output = f"{theirs}.kv_a_layernorm.weight", f"{theirs}.o_proj.weight"
    return [
        *tensors,
        whole(f"{ours}.linear_kv_down_proj.weight", down, latent + turned, hidden),
        whole(f"{ours}.kv_layernorm.weight", norm, latent),
        by_rows(f"{ours}.linear_kv_up_proj.weight", up, keys + values, latent),
        by_columns(f"{ours}.linear_proj.weight", output, hidden, values),
    ]


def _latent_reasons(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Why megatron-core's latent attention cannot compute this config."""
    latent = "megatron-core's latent attention"
    if config["attention_bias"]:
        yield f"{latent} has no biases"
    if config["rms_norm_eps"] != _LATENT_EPS:
        yield (
            f"{latent} has the eps of the other norms (rms_norm_eps) in norms of latent "
            f"vectors, transformers {_LATENT_EPS}"
        )
    if not spec.moe_layers:
        yield (
            f"{latent} is exact under tensor parallel with sequence parallel alone, which a "
            "model without experts does not need"
        )
    if not config["rope_interleave"]:
        yield f"{latent} turns interleaved pairs (rope_interleave)"
