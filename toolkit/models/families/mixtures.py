"""Mixtures of experts with llama's attention: Mixtral's in every layer, Qwen's in chosen ones
(in Qwen2-MoE with a shared expert that has its own gate), gpt-oss's with biases and sinks, and
GLM-4.5's, whose router DeepSeek-V3 (arXiv:2412.19437) introduced.

A sink of gpt-oss is a logit per head that takes part in the softmax over the scores and has no
value. Its experts compute (up + 1) · gate · sigmoid(1.702 · gate), gate and up clamped, and its
checkpoints keep those of a layer in one tensor, [in, out], gate and up in alternating columns.

DeepSeek-V3's score of an expert is the sigmoid of its logit (section 2.1.2). The experts are
chosen by score plus a correction bias, which no gradient trains, among the best groups of
experts. The chosen ones' scores without the bias, normalised to a sum of 1 and scaled, weight
their outputs. Every token passes through the shared experts, too. The first layers are dense.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from toolkit.models.families import arguments
from toolkit.models.families.base import MegatronModel
from toolkit.models.families.layers import (
    LAYER,
    LLAMA,
    attention_tensors,
    dense_mlp,
    layer_norms,
    mlp_tensors,
    outer_tensors,
)
from toolkit.models.families.tensors import (
    TensorMap,
    by_columns,
    by_rows,
    gated_alternating,
    whole,
)
from toolkit.models.model import Config
from toolkit.models.spec import ModelSpec

_OURS, _THEIRS = f"{LAYER}.mlp", f"{LLAMA.layer}.mlp"
_EXPERT = f"{_OURS}.experts.local_experts.{{expert}}", f"{_THEIRS}.experts.{{expert}}"
"""Names of an expert in megatron-core's model and in checkpoints."""


def mixture(
    config: Config,
    spec: ModelSpec,
    layers: frozenset[int],
    experts: Sequence[TensorMap],
    fields: Mapping[str, Any],
    *,
    attention: Sequence[TensorMap] | None = None,
    reasons: Iterable[str] = (),
) -> MegatronModel:
    """A decoder whose `layers` hold `experts`, with `fields` of them in TransformerConfig, and
    whose other layers have an MLP. Its attention is llama's unless given. `reasons`: why
    megatron-core cannot compute it."""
    transformer, some_dense = arguments.transformer(config, spec), len(layers) < spec.layers
    attention = attention_tensors(spec) if attention is None else attention
    tensors = [*outer_tensors(spec), *layer_norms(spec), *attention]
    if some_dense:
        tensors += dense_mlp(spec)
    if layers:
        tensors += experts
        pattern = {"moe_layer_freq": [int(layer in layers) for layer in range(spec.layers)]}
        transformer |= {**(pattern if some_dense else {}), **fields}
    return MegatronModel(
        transformer,
        arguments.gpt(config, spec),
        tuple(tensors),
        moe_layers=layers,
        padding_token=arguments.padding_token(config, spec),
        unsupported=next(chain(reasons, arguments.reasons(config, spec)), None),
    )


def expert_tensors(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer that has them."""
    router = whole(
        f"{_OURS}.router.weight", f"{_THEIRS}.gate.weight", spec.experts, spec.hidden
    )
    return [router, *mlp_tensors(spec.hidden, spec.expert_intermediate, _EXPERT)]


def shared_expert(spec: ModelSpec, inner: int, theirs: str) -> list[TensorMap]:
    """The experts of all tokens, one MLP that checkpoints call `theirs`."""
    place = f"{_OURS}.shared_experts", f"{_THEIRS}.{theirs}"
    return mlp_tensors(spec.hidden, inner, place)


def _single_expert(spec: ModelSpec) -> Iterator[str]:
    """Why megatron-core cannot normalise over the chosen experts."""
    if spec.experts_per_token == 1:
        yield (
            "one expert per token with normalised probabilities gives the router no gradient; "
            "megatron-core refuses it"
        )


def mixtral(config: Config, spec: ModelSpec) -> MegatronModel:
    """Mixtral as a megatron-core GPTModel.

    transformers normalises the chosen experts' probabilities to a sum of 1, which is the
    softmax over the chosen experts' logits alone: Megatron's softmax after top-k.
    """

    def reasons() -> Iterator[str]:
        if config["router_jitter_noise"]:
            yield (
                "router_jitter_noise: megatron-core jitters the router's input alone, "
                "transformers the experts' as well"
            )
        yield from _single_expert(spec)

    layers, fields = frozenset(range(spec.layers)), {"moe_router_pre_softmax": False}
    return mixture(config, spec, layers, expert_tensors(spec), fields, reasons=reasons())


def qwen(config: Config, spec: ModelSpec) -> MegatronModel:
    """Qwen2-MoE or Qwen3-MoE as a megatron-core GPTModel."""
    # Every `decoder_sparse_step`-th layer, less those that the config names as dense.
    step = config["decoder_sparse_step"] or 1
    layers = frozenset(range(step - 1, spec.layers, step)).difference(
        config["mlp_only_layers"] or ()
    )
    # Without normalisation the softmax runs over all experts, before the choice.
    fields = {"moe_router_pre_softmax": not config["norm_topk_prob"]}
    experts = expert_tensors(spec)
    if (inner := config["shared_expert_intermediate_size"]) is not None:
        gate = f"{_THEIRS}.shared_expert_gate.weight"
        experts += shared_expert(spec, inner, "shared_expert")
        experts.append(whole(f"{_OURS}.shared_experts.gate_weight", gate, 1, spec.hidden))
        fields |= {
            "moe_shared_expert_intermediate_size": inner,
            "moe_shared_expert_gate": True,
        }
    normalised = layers and config["norm_topk_prob"]
    reasons = _single_expert(spec) if normalised else ()
    return mixture(config, spec, layers, experts, fields, reasons=reasons)


def gpt_oss(config: Config, spec: ModelSpec) -> MegatronModel:
    """gpt-oss as a megatron-core GPTModel."""
    sinks = by_rows(
        f"{LAYER}.self_attention.core_attention.softmax_offset",
        f"{LLAMA.layer}.self_attn.sinks",
        spec.heads,
    )
    fields = {
        "softmax_type": "learnable",
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": config["swiglu_limit"],
        "glu_linear_offset": 1.0,
        "moe_router_pre_softmax": False,
    }

    def reasons() -> Iterator[str]:
        if config["swiglu_alpha"] != 1.702:
            yield "swiglu_alpha: that of the Megatron model's experts is 1.702"
        yield from _single_expert(spec)

    return mixture(
        config,
        spec,
        frozenset(range(spec.layers)),
        _biased_experts(spec),
        fields,
        attention=[*attention_tensors(spec), sinks],
        reasons=reasons(),
    )


def _biased_experts(spec: ModelSpec) -> list[TensorMap]:
    """Router and experts of a layer of gpt-oss, with their biases."""
    hidden, inner, router = spec.hidden, spec.expert_intermediate, f"{_THEIRS}.router"
    ours, theirs = _EXPERT
    first, second = f"{ours}.linear_fc1", f"{ours}.linear_fc2"
    gate_up, down = f"{theirs}.gate_up_proj", f"{theirs}.down_proj"
    return [
        whole(f"{_OURS}.router.weight", f"{router}.weight", spec.experts, hidden),
        whole(f"{_OURS}.router.bias", f"{router}.bias", spec.experts),
        gated_alternating(f"{first}.weight", gate_up, inner, hidden),
        gated_alternating(f"{first}.bias", f"{gate_up}_bias", inner, None),
        by_columns(f"{second}.weight", down, hidden, inner, transposed=True),
        whole(f"{second}.bias", f"{down}_bias", hidden),
    ]


# --- DeepSeek-V3's router -----------------------------------------------------------------


def corrected_mixture(
    config: Config,
    spec: ModelSpec,
    *,
    attention: Sequence[TensorMap] | None = None,
    reasons: Iterable[str] = (),
) -> MegatronModel:
    """A decoder with DeepSeek-V3's experts, as GLM-4.5 is. See `mixture`."""
    layers = frozenset(range(config["first_k_dense_replace"], spec.layers))
    inner = config["n_shared_experts"] * config["moe_intermediate_size"]
    fields: dict[str, Any] = {
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": config["routed_scaling_factor"],
        "moe_shared_expert_intermediate_size": inner,
    }
    if _limits_groups(config):
        fields["moe_router_num_groups"] = config["n_group"]
        fields["moe_router_group_topk"] = config["topk_group"]
    model = mixture(
        config,
        spec,
        layers,
        [*expert_tensors(spec), *shared_expert(spec, inner, "shared_experts")],
        fields,
        attention=attention,
        reasons=chain(reasons, _router_reasons(config, spec)),
    )
    bias = f"{_THEIRS}.gate.e_score_correction_bias"
    buffer = whole(f"{_OURS}.router.expert_bias", bias, spec.experts)
    return replace(model, buffers=(buffer,) if layers else ())


def _limits_groups(config: Config) -> bool:
    """Is there a group of experts that a token cannot choose?"""
    return bool(config["topk_group"] < config["n_group"])


def _router_reasons(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Why megatron-core cannot choose and weight experts as this config says."""
    chosen, groups = spec.experts_per_token, config["topk_group"]
    if not spec.moe_layers:
        return
    if config["norm_topk_prob"] != (chosen > 1):
        yield (
            "megatron-core normalises the sigmoid scores of several experts per token, and "
            "those of one expert per token never"
        )
    if _limits_groups(config) and chosen // groups != 2:
        yield (
            "megatron-core ranks groups of experts by their best num_experts_per_tok // "
            f"topk_group ({chosen} // {groups}), transformers by their best two"
        )
