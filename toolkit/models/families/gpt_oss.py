"""gpt-oss: mixture of experts with biases everywhere, attention sinks and alternating windows.

A sink is a logit per head that takes part in the softmax over the scores and has no value. The
experts compute (up + 1) · gate · sigmoid(1.702 · gate), gate and up clamped. Checkpoints keep
the experts of a layer in one tensor, [in, out], gate and up projection in alternating columns.
"""

from dataclasses import replace

from toolkit.models.config_keys import SIZE, Key, keys_of
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.llama_like import even_layers
from toolkit.models.families.mixtures import mixture, unsupported_normalised_router
from toolkit.models.families.shape import counted, moe_layers
from toolkit.models.families.tensors import (
    TensorMap,
    by_columns,
    by_rows,
    gated_alternating,
    whole,
)
from toolkit.models.spec import ModelSpec

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
"""What turns positions where the config does not say it."""


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer, with their biases."""
    hidden, inner = spec.hidden, spec.expert_intermediate
    router, ours = f"{llama.HF_LAYER}.mlp.router", f"{llama.LAYER}.mlp.router"
    expert = f"{llama.HF_LAYER}.mlp.experts.{{expert}}"
    megatron = f"{llama.LAYER}.mlp.experts.local_experts.{{expert}}"
    gate_up, down = f"{expert}.gate_up_proj", f"{expert}.down_proj"
    return [
        whole(f"{ours}.weight", f"{router}.weight", spec.experts, hidden),
        whole(f"{ours}.bias", f"{router}.bias", spec.experts),
        gated_alternating(f"{megatron}.linear_fc1.weight", gate_up, inner, hidden),
        gated_alternating(f"{megatron}.linear_fc1.bias", f"{gate_up}_bias", inner, None),
        by_columns(f"{megatron}.linear_fc2.weight", down, hidden, inner, transposed=True),
        whole(f"{megatron}.linear_fc2.bias", f"{down}_bias", hidden),
    ]


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """gpt-oss as a megatron-core GPTModel."""
    sinks = by_rows(
        f"{llama.LAYER}.self_attention.core_attention.softmax_offset",
        f"{llama.HF_LAYER}.self_attn.sinks",
        spec.heads,
    )
    fields = {
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": settings["swiglu_limit"],
        "glu_linear_offset": 1.0,
        "moe_router_pre_softmax": False,
    }
    attention = [*llama.attention_tensors(spec, settings), sinks]
    experts = expert_tensors(spec)
    return mixture(spec, settings, moe_layers(settings), experts, fields, attention)


def unsupported(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this gpt_oss; None when it can."""
    alpha = None
    if settings["swiglu_alpha"] != 1.702:
        alpha = "swiglu_alpha: that of the Megatron model's experts is 1.702"
    return common.first_reason(
        alpha, unsupported_normalised_router(spec), common.unsupported_biases(spec)
    )


GPT_OSS = Family(
    "gpt_oss",
    keys_of(
        "gpt_oss",
        sliding_window=Key(SIZE, 128),
        # In published configs; transformers reads them nowhere.
        initial_context_length=None,
        experts_per_token=None,
    ),
    model,
    unsupported,
    aliases={"num_experts": "num_local_experts"},
    attention=lambda _: "eager",  # sdpa has no sinks
    shape=lambda settings: replace(counted(settings), scores="sinks"),
    stacked_experts=True,
    mlp_bias=True,
    theta=150_000.0,
    rope=_YARN,
    sliding=even_layers,
)
