"""Qwen3-MoE: qwen3 in which chosen layers hold experts in place of a dense MLP."""

from toolkit.models.config_check import Settings
from toolkit.models.families import llama
from toolkit.models.families.base import (
    Family,
    MegatronModel,
    common_gpt,
    first_reason,
    rotary,
    sliding_window,
)
from toolkit.models.families.llama import (
    attention_tensors,
    decoder_transformer,
    mlp_tensors,
    outer_tensors,
)
from toolkit.models.families.mixtral import expert_tensors, unsupported_normalised_router
from toolkit.models.spec import ModelSpec


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Qwen3-MoE as a megatron-core GPTModel."""
    experts = _moe_layers(spec, settings)
    transformer = decoder_transformer(spec, settings)
    transformer |= sliding_window(spec, (True,) * spec.layers)
    tensors = [*outer_tensors(spec), *attention_tensors(spec)]
    if experts:
        # Without normalisation the softmax runs over all experts, before the choice.
        transformer["moe_router_pre_softmax"] = not settings["norm_topk_prob"]
        tensors += expert_tensors(spec)
    if len(experts) < spec.layers:
        tensors += mlp_tensors(spec)
        if experts:
            transformer["moe_layer_freq"] = [int(i in experts) for i in range(spec.layers)]
    gpt = common_gpt(spec) | rotary(settings)
    return MegatronModel(transformer, gpt, tuple(tensors), moe_layers=experts)


def _moe_layers(spec: ModelSpec, settings: Settings) -> frozenset[int]:
    """Every `decoder_sparse_step`-th layer, less those that the config names as dense."""
    dense, step = settings["mlp_only_layers"] or (), settings["decoder_sparse_step"]
    return frozenset(
        layer for layer in range(spec.layers) if (layer + 1) % step == 0 and layer not in dense
    )


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this qwen3_moe; None when it can."""
    router = None
    if spec.moe_layers and settings["norm_topk_prob"]:
        router = unsupported_normalised_router(spec)
    return first_reason(router, llama.unsupported(spec, settings))


QWEN3_MOE = Family("qwen3_moe", model, unsupported)
