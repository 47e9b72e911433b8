"""Dense decoders: llama's layers, and what other families' have besides or instead.

A family whose layers differ in names, norms and factors alone is a row here.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from toolkit.models.families import arguments
from toolkit.models.families.base import Family, MegatronModel
from toolkit.models.families.layers import (
    LLAMA,
    Names,
    attention_tensors,
    dense_mlp,
    layer_norms,
    outer_tensors,
)
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec


def dense(
    config: Config,
    spec: ModelSpec,
    *,
    names: Names = LLAMA,
    norms_over_width: bool = False,
    interleaved: bool = False,
    gemma: bool = False,
) -> MegatronModel:
    """Llama, or a dense family with its layers, as a megatron-core GPTModel.

    `interleaved`: neighbours are rotated together, not halves. `gemma`: norms of weight 1 + w,
    and scaled embeddings.
    """
    fields = arguments.transformer(config, spec) | _score_scale(config)
    if interleaved:
        fields["rotary_interleaved"] = True
    if gemma:
        fields["layernorm_zero_centered_gamma"] = True
    return MegatronModel(
        fields,
        arguments.gpt(config, spec),
        (
            *outer_tensors(spec, names),
            *layer_norms(spec, names),
            *attention_tensors(spec, names, norms_over_width=norms_over_width),
            *dense_mlp(spec, names),
        ),
        parallel_residual=bool(config["use_parallel_residual"]),
        norms=names.norm_places,
        norms_over_width=norms_over_width,
        score_cap=config["attn_logit_softcapping"],
        logit_cap=config["final_logit_softcapping"],
        embedding_scale=spec.hidden**0.5 if gemma else config["embedding_multiplier"] or 1.0,
        residual_scale=config["residual_multiplier"] or 1.0,
        logits_divisor=config["logits_scaling"] or 1.0,
        padding_token=arguments.padding_token(config, spec),
        unsupported=next(arguments.reasons(config, spec), None),
    )


def _score_scale(config: Config) -> dict[str, Any]:
    """TransformerConfig fields of the factor of attention scores, if it is not 1/√head_dim."""
    scale = config["attention_multiplier"]
    if (size := config["query_pre_attn_scalar"]) is not None:
        scale = size**-0.5
    if config["scale_attn_weights"] is False:
        scale = 1.0
    return {} if scale is None else {"softmax_scale": scale}


_FUSED = ("gate_up_proj",) * 2
_PHI3 = Names(up=_FUSED, qkv=("qkv_proj",) * 3)
_OLMO = Names(
    norms={
        "self_attn_bda.norm": "post_attention_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
)
_GLM4 = Names(
    up=_FUSED,
    norms={
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_self_attn_layernorm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp_bda.norm": "post_mlp_layernorm",
    },
)
_GEMMA = Names(
    norms={
        "input_layernorm": "input_layernorm",
        "self_attn_bda.norm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "mlp_bda.norm": "post_feedforward_layernorm",
    }
)
_GPT2 = Names(
    layer="transformer.h.{layer}",
    embedding="transformer.wte",
    positions="transformer.wpe",
    final_norm="transformer.ln_f",
    norms={"input_layernorm": "ln_1", "pre_mlp_layernorm": "ln_2"},
    attention="attn",
    qkv=("c_attn",) * 3,
    output="c_proj",
    up=("c_fc",),
    down="c_proj",
    transposed=True,
)
_GPT_NEOX = Names(
    layer="gpt_neox.layers.{layer}",
    embedding="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    attention="attention",
    qkv=("query_key_value",),
    output="dense",
    up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)
DENSE: Mapping[str, Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3"), dense),
    "phi3": partial(dense, names=_PHI3),
    "glm4": partial(dense, names=_GLM4, interleaved=True),
    **dict.fromkeys(("olmo2", "olmo3"), partial(dense, names=_OLMO, norms_over_width=True)),
    **dict.fromkeys(("gemma2", "gemma3_text"), partial(dense, names=_GEMMA, gemma=True)),
    "gpt2": partial(dense, names=_GPT2),
    "gpt_neox": partial(dense, names=_GPT_NEOX),
}
