"""Mixtral: mistral in which every MLP is a set of experts chosen by a router."""

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
    HF_LAYER,
    LAYER,
    attention_tensors,
    decoder_transformer,
    outer_tensors,
)
from toolkit.models.families.tensors import TensorMap, by_columns, gated, whole
from toolkit.models.spec import ModelSpec


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer that has them."""
    hidden, inner = spec.hidden, spec.expert_intermediate
    expert = f"{HF_LAYER}.mlp.experts.{{expert}}"
    megatron = f"{LAYER}.mlp.experts.local_experts.{{expert}}"
    gate, up, down = (f"{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
    router = f"{HF_LAYER}.mlp.gate.weight"
    return [
        whole(f"{LAYER}.mlp.router.weight", router, spec.experts, hidden),
        gated(f"{megatron}.linear_fc1.weight", gate, up, inner, hidden),
        by_columns(f"{megatron}.linear_fc2.weight", down, hidden, inner),
    ]


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Mixtral as a megatron-core GPTModel.

    transformers normalises the chosen experts' probabilities to a sum of 1, which is the
    softmax over the chosen experts' logits alone: Megatron's softmax after top-k.
    """
    window = sliding_window(spec, (True,) * spec.layers)
    router = {"moe_router_pre_softmax": False}
    return MegatronModel(
        decoder_transformer(spec, settings) | window | router,
        common_gpt(spec) | rotary(settings, theta=1e6),
        (*outer_tensors(spec), *attention_tensors(spec), *expert_tensors(spec)),
        moe_layers=frozenset(range(spec.layers)),
    )


def unsupported_normalised_router(spec: ModelSpec) -> str | None:
    """Why megatron-core cannot normalise over the chosen experts; None when it can."""
    if spec.experts_per_token > 1:
        return None
    return (
        "one expert per token with normalised probabilities gives the router no gradient; "
        "megatron-core refuses it"
    )


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this mixtral; None when it can."""
    jitter = None
    if settings["router_jitter_noise"]:
        jitter = "router_jitter_noise: megatron-core jitters the router's input alone, \
transformers the experts' as well"
    return first_reason(
        jitter, unsupported_normalised_router(spec), llama.unsupported(spec, settings)
    )


MIXTRAL = Family("mixtral", model, unsupported)
