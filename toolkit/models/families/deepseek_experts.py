"""DeepSeek-V3's mixture of experts (arXiv:2412.19437, section 2.1.2), which glm4_moe has too.

A token's score of an expert is the sigmoid of its logit. The experts are chosen by score plus
a correction bias, which no gradient trains, among the best groups of experts; the chosen ones'
scores without the bias, normalised to a sum of 1 and scaled, weight their outputs. Every token
passes through the shared experts as well. The first layers are dense.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from toolkit.models.config_keys import keys_of
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.mixtures import expert_tensors, mixture, shared_expert_tensors
from toolkit.models.families.shape import counted, sizes
from toolkit.models.families.tensors import TensorMap, whole
from toolkit.models.spec import ModelSpec

ALIASES = {
    "num_local_experts": "n_routed_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}
STANDARD = {"num_experts": "n_routed_experts"}


def shape(spec: ModelSpec, settings: Settings) -> ModelSpec:
    """The shape with the first layers dense."""
    sparse = len(_moe_layers(spec, settings))
    inner = settings["moe_intermediate_size"] if sparse else 0
    return replace(spec, moe_layers=sparse, expert_intermediate=inner)


def _moe_layers(spec: ModelSpec, settings: Settings) -> frozenset[int]:
    return frozenset(range(settings["first_k_dense_replace"], spec.layers))


def model(
    spec: ModelSpec, settings: Settings, attention: Sequence[TensorMap] | None = None
) -> MegatronModel:
    """A decoder with these experts as a megatron-core GPTModel; its attention is llama's unless
    given."""
    layers = _moe_layers(spec, settings)
    inner = settings["n_shared_experts"] * settings["moe_intermediate_size"]
    shared = f"{llama.HF_LAYER}.mlp.shared_experts"
    experts = [*expert_tensors(spec), *shared_expert_tensors(spec.hidden, inner, shared)]
    fields = _router(settings) | {"moe_shared_expert_intermediate_size": inner}
    router = f"{llama.HF_LAYER}.mlp.gate.e_score_correction_bias"
    bias = whole(f"{llama.LAYER}.mlp.router.expert_bias", router, spec.experts)
    plain = mixture(spec, settings, layers, experts, fields, attention)
    return replace(plain, buffers=(bias,) if layers else ())


def _router(settings: Settings) -> dict[str, Any]:
    """TransformerConfig fields of the choice of experts."""
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": settings["routed_scaling_factor"],
    }
    if _is_limited(settings):
        fields["moe_router_num_groups"] = settings["n_group"]
        fields["moe_router_group_topk"] = settings["topk_group"]
    return fields


def _is_limited(settings: Settings) -> bool:
    """Is there a group of experts that a token cannot choose?"""
    return bool(settings["topk_group"] < settings["n_group"])


def unsupported_router(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot choose and weight experts as this config says."""
    chosen, groups = spec.experts_per_token, settings["topk_group"]
    if not spec.moe_layers:
        return None
    if settings["norm_topk_prob"] != (chosen > 1):
        return (
            "megatron-core normalises the sigmoid scores of several experts per token, and "
            "those of one expert per token never"
        )
    if _is_limited(settings) and chosen // groups != 2:
        return (
            "megatron-core ranks groups of experts by their best num_experts_per_tok // "
            f"topk_group ({chosen} // {groups}), transformers by their best two"
        )
    return None


def _shape_of_glm4_moe(settings: Settings) -> ModelSpec:
    spec = replace(sizes(settings), query_key_norm=settings["use_qk_norm"])
    return counted(settings, shape(spec, settings))


def _unsupported_glm4_moe(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this glm4_moe; None when it can."""
    return common.first_reason(
        unsupported_router(spec, settings), llama.unsupported(spec, settings)
    )


GLM4_MOE = Family(
    "glm4_moe",
    keys_of("glm4_moe", head_dim=None, partial_rotary_factor=0.5),
    model,
    _unsupported_glm4_moe,
    aliases=ALIASES,
    standard=STANDARD,
    attention_output_bias=False,
    shape=_shape_of_glm4_moe,
)
"""GLM-4.5: llama with positions that turn half of each head, optional query and key norms, and
these experts. `attention_bias` is of query, key and value alone."""
