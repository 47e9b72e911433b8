"""Mixtures of experts with llama's attention: Mixtral's in every layer, and Qwen's in chosen
ones, in Qwen2-MoE with a shared expert that has its own gate."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.models.families import common, llama
from toolkit.models.families.base import MegatronModel
from toolkit.models.families.tensors import TensorMap, whole
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec


def mixture(
    config: Config,
    spec: ModelSpec,
    layers: frozenset[int],
    experts: Sequence[TensorMap],
    fields: Mapping[str, Any],
    attention: Sequence[TensorMap] | None = None,
    mlp: str = f"{llama.HF_LAYER}.mlp",
) -> MegatronModel:
    """A decoder whose `layers` hold `experts`, with `fields` of them in TransformerConfig, and
    whose other layers have an MLP that checkpoints call `mlp`; its attention is llama's unless
    given."""
    transformer, dense = common.transformer(config, spec), len(layers) < spec.layers
    attention = llama.attention_tensors(spec) if attention is None else attention
    tensors = [*llama.outer_tensors(spec), *attention]
    if dense:
        tensors += llama.mlp_tensors(spec, mlp)
    if layers:
        tensors += experts
        pattern = {"moe_layer_freq": [int(layer in layers) for layer in range(spec.layers)]}
        transformer |= {**(pattern if dense else {}), **fields}
    return MegatronModel(
        transformer,
        common.gpt(config, spec),
        tuple(tensors),
        moe_layers=layers,
        padding_token=common.padding_token(config, spec),
        unsupported=llama.unsupported(config, spec),
    )


def refusing(model: MegatronModel, *reasons: str | None) -> MegatronModel:
    """The model, unsupported for the first of these reasons or its own."""
    return replace(model, unsupported=next(filter(None, reasons), model.unsupported))


def _moe_layers(config: Config, spec: ModelSpec) -> frozenset[int]:
    """Layers that hold experts: every `decoder_sparse_step`-th (without the key, all), less
    those that the config names as dense."""
    step = config["decoder_sparse_step"] or 1
    layers = range(step - 1, spec.layers, step)
    return frozenset(layers).difference(config["mlp_only_layers"] or ())


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer that has them."""
    hidden, inner, name = spec.hidden, spec.expert_intermediate, f"{llama.HF_LAYER}.mlp"
    router, experts = f"{llama.LAYER}.mlp.router.weight", f"{llama.LAYER}.mlp.experts"
    names = f"{experts}.local_experts.{{expert}}", f"{name}.experts.{{expert}}"
    return [
        whole(router, f"{name}.gate.weight", spec.experts, hidden),
        *llama.gated_mlp(hidden, inner, *names),
    ]


def shared_expert_tensors(hidden: int, inner: int, name: str) -> list[TensorMap]:
    """The experts of all tokens, one MLP that checkpoints call `name`."""
    return llama.gated_mlp(hidden, inner, f"{llama.LAYER}.mlp.shared_experts", name)


def router_reason(spec: ModelSpec) -> str | None:
    """Why megatron-core cannot normalise over the chosen experts; None when it can."""
    if spec.experts_per_token > 1:
        return None
    return (
        "one expert per token with normalised probabilities gives the router no gradient; "
        "megatron-core refuses it"
    )


def mixtral(config: Config, spec: ModelSpec) -> MegatronModel:
    """Mixtral as a megatron-core GPTModel.

    transformers normalises the chosen experts' probabilities to a sum of 1, which is the
    softmax over the chosen experts' logits alone: Megatron's softmax after top-k.
    """
    router, layers = {"moe_router_pre_softmax": False}, frozenset(range(spec.layers))
    jitter = (
        "router_jitter_noise: megatron-core jitters the router's input alone, transformers "
        "the experts' as well"
    )
    return refusing(
        mixture(config, spec, layers, expert_tensors(spec), router),
        jitter if config["router_jitter_noise"] else None,
        router_reason(spec),
    )


def qwen(config: Config, spec: ModelSpec) -> MegatronModel:
    """Qwen2-MoE or Qwen3-MoE as a megatron-core GPTModel."""
    # Without normalisation the softmax runs over all experts, before the choice.
    fields = {"moe_router_pre_softmax": not config["norm_topk_prob"]}
    experts = expert_tensors(spec)
    if (inner := config["shared_expert_intermediate_size"]) is not None:
        shared = f"{llama.HF_LAYER}.mlp.shared_expert"
        gate = f"{llama.LAYER}.mlp.shared_experts.gate_weight"
        experts += shared_expert_tensors(spec.hidden, inner, shared)
        experts.append(whole(gate, f"{shared}_gate.weight", 1, spec.hidden))
        fields |= {
            "moe_shared_expert_intermediate_size": inner,
            "moe_shared_expert_gate": True,
        }
    return refusing(
        mixture(config, spec, _moe_layers(config, spec), experts, fields),
        router_reason(spec) if spec.moe_layers and config["norm_topk_prob"] else None,
    )
