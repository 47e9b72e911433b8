"""Mixtures of experts with llama's attention: Mixtral's in every layer, and Qwen's in chosen
ones, in Qwen2-MoE with a shared expert that has its own gate."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.models.config_keys import COUNT, Key, keys_of
from toolkit.models.families import common, llama
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import counted, moe_layers
from toolkit.models.families.tensors import TensorMap, whole
from toolkit.models.spec import ModelSpec


def mixture(
    spec: ModelSpec,
    settings: Settings,
    layers: frozenset[int],
    experts: Sequence[TensorMap],
    fields: Mapping[str, Any],
    attention: Sequence[TensorMap] | None = None,
    mlp: str = f"{llama.HF_LAYER}.mlp",
) -> MegatronModel:
    """A decoder whose `layers` hold `experts`, with `fields` of them in TransformerConfig, and
    whose other layers have an MLP that checkpoints call `mlp`; its attention is llama's unless
    given."""
    transformer, dense = common.transformer(spec, settings), len(layers) < spec.layers
    attention = llama.attention_tensors(spec, settings) if attention is None else attention
    tensors = [*llama.outer_tensors(spec), *attention]
    if dense:
        tensors += llama.mlp_tensors(spec, mlp)
    if layers:
        tensors += experts
        pattern = {"moe_layer_freq": [int(layer in layers) for layer in range(spec.layers)]}
        transformer |= {**(pattern if dense else {}), **fields}
    gpt = common.gpt(spec, settings)
    return MegatronModel(transformer, gpt, tuple(tensors), moe_layers=layers)


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer that has them."""
    hidden, inner, name = spec.hidden, spec.expert_intermediate, f"{llama.HF_LAYER}.mlp"
    router, experts = f"{llama.LAYER}.mlp.router.weight", f"{llama.LAYER}.mlp.experts"
    one = f"{experts}.local_experts.{{expert}}", f"{name}.experts.{{expert}}"
    return [
        whole(router, f"{name}.gate.weight", spec.experts, hidden),
        *llama.gated_mlp(hidden, inner, *one),
    ]


def shared_expert_tensors(hidden: int, inner: int, name: str) -> list[TensorMap]:
    """The experts of all tokens, one MLP that checkpoints call `name`."""
    return llama.gated_mlp(hidden, inner, f"{llama.LAYER}.mlp.shared_experts", name)


def unsupported_normalised_router(spec: ModelSpec) -> str | None:
    """Why megatron-core cannot normalise over the chosen experts; None when it can."""
    if spec.experts_per_token > 1:
        return None
    return (
        "one expert per token with normalised probabilities gives the router no gradient; "
        "megatron-core refuses it"
    )


def _mixtral(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Mixtral as a megatron-core GPTModel.

    transformers normalises the chosen experts' probabilities to a sum of 1, which is the
    softmax over the chosen experts' logits alone: Megatron's softmax after top-k.
    """
    router = {"moe_router_pre_softmax": False}
    return mixture(spec, settings, moe_layers(settings), expert_tensors(spec), router)


def _unsupported_mixtral(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this mixtral; None when it can."""
    jitter = None
    if settings["router_jitter_noise"]:
        jitter = "router_jitter_noise: megatron-core jitters the router's input alone, \
transformers the experts' as well"
    return common.first_reason(
        jitter, unsupported_normalised_router(spec), llama.unsupported(spec, settings)
    )


MIXTRAL = Family(
    "mixtral",
    keys_of("mixtral"),
    _mixtral,
    _unsupported_mixtral,
    aliases={"num_experts": "num_local_experts"},
    theta=1e6,
)


def _qwen(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Qwen2-MoE or Qwen3-MoE as a megatron-core GPTModel."""
    # Without normalisation the softmax runs over all experts, before the choice.
    fields = {"moe_router_pre_softmax": not settings["norm_topk_prob"]}
    experts = expert_tensors(spec)
    if (inner := settings["shared_expert_intermediate_size"]) is not None:
        shared = f"{llama.HF_LAYER}.mlp.shared_expert"
        gate = f"{llama.LAYER}.mlp.shared_experts.gate_weight"
        experts += shared_expert_tensors(spec.hidden, inner, shared)
        experts.append(whole(gate, f"{shared}_gate.weight", 1, spec.hidden))
        fields |= {
            "moe_shared_expert_intermediate_size": inner,
            "moe_shared_expert_gate": True,
        }
    return mixture(spec, settings, moe_layers(settings), experts, fields)


def _unsupported_qwen(spec: ModelSpec, settings: Settings) -> str | None:
    """Why megatron-core cannot compute this mixture; None when it can."""
    router = None
    if spec.moe_layers and settings["norm_topk_prob"]:
        router = unsupported_normalised_router(spec)
    return common.first_reason(router, llama.unsupported(spec, settings))


def _even_lower_layers(settings: Settings) -> range:
    """Every other one of the first `max_window_layers` layers, beginning with the first."""
    return range(0, min(settings["max_window_layers"], settings["num_hidden_layers"]), 2)


QWEN2_MOE = Family(
    "qwen2_moe",
    # transformers saves a window of 0 where use_sliding_window is false.
    keys_of("qwen2_moe", head_dim=None, sliding_window=Key(COUNT, 4096, nullable=True)),
    _qwen,
    _unsupported_qwen,
    shape=counted,
    sliding=_even_lower_layers,
)
QWEN3_MOE = Family(
    "qwen3_moe",
    # Published configs have max_window_layers; transformers reads it nowhere.
    keys_of("qwen3_moe", head_dim=None, max_window_layers=28),
    _qwen,
    _unsupported_qwen,
    aliases={"num_local_experts": "num_experts"},
    query_key_norm=True,
)
