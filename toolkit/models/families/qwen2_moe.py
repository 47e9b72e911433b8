"""Qwen2-MoE: qwen3_moe with qwen2's biases instead of head norms, and in every layer with
experts an additional shared expert, weighted by its own gate."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import COUNT, FLAG, LAYER_TYPES, SIZE, Key, without
from toolkit.models.families import deepseek_experts, llama, qwen3_moe
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import counted
from toolkit.models.families.tensors import whole
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **without(qwen3_moe.KEYS, "attention_bias"),
    "intermediate_size": Key(SIZE, 5632),
    "num_attention_heads": Key(SIZE, 16),
    "num_key_value_heads": Key(SIZE, 16, nullable=True),
    # transformers saves 0 where use_sliding_window is false.
    "sliding_window": Key(COUNT, 4096, nullable=True),
    "layer_types": Key(LAYER_TYPES, nullable=True),
    "moe_intermediate_size": Key(SIZE, 1408),
    "shared_expert_intermediate_size": Key(SIZE, 5632),
    "num_experts_per_tok": Key(SIZE, 4),
    "num_experts": Key(SIZE, 60),
    "qkv_bias": Key(FLAG, True),
}


def even_lower_layers(settings: Settings) -> range:
    """Every other one of the first `max_window_layers` layers, beginning with the first."""
    return range(0, min(settings["max_window_layers"], settings["num_hidden_layers"]), 2)


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Qwen2-MoE as a megatron-core GPTModel."""
    routed = qwen3_moe.model(spec, settings)
    if not routed.moe_layers:
        return routed
    inner = settings["shared_expert_intermediate_size"]
    name = f"{llama.HF_LAYER}.mlp.shared_expert"
    shared = deepseek_experts.shared_expert_tensors(spec.hidden, inner, name)
    weight = f"{llama.LAYER}.mlp.shared_experts.gate_weight"
    gate = whole(weight, f"{llama.HF_LAYER}.mlp.shared_expert_gate.weight", 1, spec.hidden)
    fields = {
        "moe_shared_expert_intermediate_size": inner,
        "moe_shared_expert_gate": True,
    }
    return replace(
        routed,
        transformer={**routed.transformer, **fields},
        tensors=(*routed.tensors, *shared, gate),
    )


QWEN2_MOE = Family(
    "qwen2_moe",
    KEYS,
    model,
    qwen3_moe.unsupported,
    shape=counted,
    sliding=even_lower_layers,
)
