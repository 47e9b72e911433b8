"""DeepSeek-V3's mixture of experts (arXiv:2412.19437, section 2.1.2), which glm4_moe has too.

A token's score of an expert is the sigmoid of its logit. The experts are chosen by score plus
a correction bias, which no gradient trains, among the best groups of experts; the chosen ones'
scores without the bias, normalised to a sum of 1 and scaled, weight their outputs. Every token
passes through the shared experts as well. The first layers are dense.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.config_keys import COUNT, FLAG, POSITIVE_FLOAT, SIZE, Key
from toolkit.models.families import llama, mixtral
from toolkit.models.families.base import MegatronModel, Settings
from toolkit.models.families.tensors import TensorMap, by_columns, gated, whole
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    "moe_intermediate_size": Key(SIZE, 1408),
    "num_experts_per_tok": Key(SIZE, 8),
    "output_router_logits": Key(FLAG, False),
    "n_shared_experts": Key(SIZE, 1),
    "n_routed_experts": Key(SIZE, 128),
    "routed_scaling_factor": Key(POSITIVE_FLOAT, 1.0),
    "n_group": Key(SIZE, 1),
    "topk_group": Key(SIZE, 1),
    "first_k_dense_replace": Key(COUNT, 1),
    "norm_topk_prob": Key(FLAG, True),
    # Published checkpoints hold such layers; transformers leaves them out.
    "num_mtp_layers": Key(COUNT, 1),
}
"""With glm4_moe's defaults."""

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


def shared_expert_tensors(hidden: int, inner: int, name: str) -> list[TensorMap]:
    """The experts of all tokens, one MLP that checkpoints call `name`."""
    megatron = f"{llama.LAYER}.mlp.shared_experts"
    gate, up, down = (f"{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return [
        gated(f"{megatron}.linear_fc1.weight", gate, up, inner, hidden),
        by_columns(f"{megatron}.linear_fc2.weight", down, hidden, inner),
    ]


def with_experts(dense: MegatronModel, spec: ModelSpec, settings: Settings) -> MegatronModel:
    """A model without its MLPs, completed: dense ones in the first layers, experts above."""
    layers = _moe_layers(spec, settings)
    tensors = [*dense.tensors]
    if len(layers) < spec.layers:
        tensors += llama.mlp_tensors(spec)
    if not layers:
        return replace(dense, tensors=tuple(tensors))
    inner = settings["n_shared_experts"] * settings["moe_intermediate_size"]
    tensors += mixtral.expert_tensors(spec)
    shared = f"{llama.HF_LAYER}.mlp.shared_experts"
    tensors += shared_expert_tensors(spec.hidden, inner, shared)
    router = f"{llama.HF_LAYER}.mlp.gate.e_score_correction_bias"
    bias = whole(f"{llama.LAYER}.mlp.router.expert_bias", router, spec.experts)
    fields = _router(settings) | {"moe_shared_expert_intermediate_size": inner}
    if len(layers) < spec.layers:
        fields["moe_layer_freq"] = [int(i in layers) for i in range(spec.layers)]
    return replace(
        dense,
        transformer={**dense.transformer, **fields},
        tensors=tuple(tensors),
        buffers=(bias,),
        moe_layers=layers,
    )


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
