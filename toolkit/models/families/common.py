"""Common parts of the families' translation of a config to megatron-core's terms."""

from collections.abc import Mapping
from typing import Any

from toolkit.models.families.base import Settings
from toolkit.models.families.shape import sliding_layers
from toolkit.models.families.tensors import Heads, TensorMap, by_rows, whole
from toolkit.models.spec import ModelSpec

HF_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
"""transformers' name of an activation → silu, gelu (exact) or gelu_tanh (approximation)."""


def transformer_sizes(spec: ModelSpec) -> dict[str, Any]:
    """The TransformerConfig fields that follow from a model's shape alone; no dropout."""
    fields: dict[str, Any] = {
        # megatron-core's own default is 0.1.
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "num_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_query_groups": spec.kv_heads,
        "kv_channels": spec.head_dim,
        "ffn_hidden_size": spec.intermediate,
        "normalization": "LayerNorm" if spec.layer_norm else "RMSNorm",
        "gated_linear_unit": spec.gated_mlp,
        "add_bias_linear": spec.mlp_bias,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.query_key_norm,
    }
    if spec.moe_layers:
        fields |= {
            "num_moe_experts": spec.experts,
            "moe_ffn_hidden_size": spec.expert_intermediate,
            "moe_router_topk": spec.experts_per_token,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        }
    return fields


def transformer(spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    """The same with those that follow from the keys and traits that several families have."""
    fields = transformer_sizes(spec) | {
        "attention_dropout": dropout(settings, "attention_dropout", "attn_pdrop"),
        "hidden_dropout": dropout(settings, "hidden_dropout", "resid_pdrop"),
        "layernorm_epsilon": _first_of(settings, *_EPSILONS),
        "activation_func": HF_ACTIVATIONS.get(activation(settings)),
        **sliding_window(settings),
    }
    if settings.family.interleaved:
        fields["rotary_interleaved"] = True
    if settings["no_rope_layer_interval"] is not None:
        unturned = layers_without_rotary(settings)
        fields["no_rope_freq"] = [int(layer in unturned) for layer in range(spec.layers)]
    return fields


_EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon")


def gpt_sizes(spec: ModelSpec) -> dict[str, Any]:
    """The GPTModel arguments that follow from a model's shape alone."""
    return {
        "vocab_size": spec.vocab,
        "max_sequence_length": spec.max_positions,
        "share_embeddings_and_output_weights": spec.tied_embeddings,
    }


def gpt(spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    """The GPTChunk arguments, positions included."""
    positions = {"position_embedding_type": "learned_absolute"}
    return gpt_sizes(spec) | (rotary(settings) if settings.family.rotary else positions)


def activation(settings: Settings) -> str:
    """transformers' name of the MLP's activation."""
    return str(_first_of(settings, "hidden_activation", "activation_function", "hidden_act"))


def _first_of(settings: Settings, *keys: str) -> Any:
    """The value of the first of these keys that the family has."""
    return next(value for key in keys if (value := settings[key]) is not None)


def layers_without_rotary(settings: Settings) -> list[int]:
    """Layers that the list marks with 0; without a list, the last of every interval."""
    layers, stated = range(settings["num_hidden_layers"]), settings["no_rope_layers"]
    if stated is not None:
        return [layer for layer in layers if not stated[layer]]
    return [layer for layer in layers if (layer + 1) % settings["no_rope_layer_interval"] == 0]


def heads_of(spec: ModelSpec) -> Heads:
    """The attention heads of a layer."""
    return Heads(spec.heads, spec.kv_heads, spec.head_dim)


def dropout(settings: Settings, *keys: str) -> float:
    """A dropout probability under one of these keys: 0 unless stated, regardless of
    transformers' default."""
    return float(next((settings.stated[key] for key in keys if key in settings.stated), 0.0))  # type: ignore[arg-type]


def sliding_window(settings: Settings) -> dict[str, Any]:
    """TransformerConfig fields of sliding-window attention; empty when no layer has it.

    transformers counts the query itself among the window's keys, Megatron only those
    before it.
    """
    sliding, layers = sliding_layers(settings), range(settings["num_hidden_layers"])
    if not sliding:
        return {}
    fields: dict[str, Any] = {"window_size": (settings["sliding_window"] - 1, 0)}
    if len(sliding) < len(layers):
        fields["window_attn_skip_freq"] = [int(layer in sliding) for layer in layers]
    return fields


def outer_tensors(
    spec: ModelSpec, embedding: str, norm: str, positions: str = ""
) -> list[TensorMap]:
    """Embeddings, final norm and, where it is not tied, the output projection."""
    hidden, vocab = spec.hidden, spec.vocab
    words = "embedding.word_embeddings.weight"
    tensors = [by_rows(words, f"{embedding}.weight", vocab, hidden, padded=True)]
    if positions:
        name = "embedding.position_embeddings.weight"
        tensors.append(whole(name, f"{positions}.weight", spec.max_positions, hidden))
    for part in ("weight", "bias") if spec.layer_norm else ("weight",):
        tensors.append(whole(f"decoder.final_layernorm.{part}", f"{norm}.{part}", hidden))
    if not spec.tied_embeddings:
        head = by_rows("output_layer.weight", "lm_head.weight", vocab, hidden, padded=True)
        tensors.append(head)
    return tensors


# --- rotary positions -------------------------------------------------------------------


def frequencies_limit(settings: Settings) -> int | None:
    """Up to which length the rotary frequencies of transformers' model do not depend on the
    longest sequence that it computes; None: up to any."""
    rope, named = rope_of(settings), "original_max_position_embeddings"
    limit: int | None = settings["max_position_embeddings"]
    if rope_type_of(rope) == "longrope":
        limit = settings[named] or rope.get(named, limit)
    return limit if rope_type_of(rope) in ("dynamic", "longrope") else None


def rope_of(settings: Settings, layer_type: str = "full_attention") -> Mapping[str, Any]:
    """The map of rotary settings, under its old or its new name; empty when not stated.

    In a family whose `layer_types` rotate differently, that of one type; there, the old name
    stands for `full_attention`.
    """
    stated: Mapping[str, Any] = settings["rope_parameters"] or settings["rope_scaling"] or {}
    if not settings.family.rope_bases:
        return stated
    if settings["rope_scaling"]:
        return stated if layer_type == "full_attention" else {}
    return stated.get(layer_type) or {}


def rope_type_of(rope: Mapping[str, Any]) -> Any:
    """The variant that a map of rotary settings names, under its new or its old key."""
    return rope.get("rope_type", rope.get("type", "default"))


def rotary(settings: Settings) -> dict[str, Any]:
    """GPTChunk arguments of rotary positions.

    `rope_parameters` is the complete map from which transformers computes the frequencies; it
    is omitted if every pair has the default frequencies, which are megatron-core's own.
    `windowed_rope_parameters` is that of sliding layers, if they rotate differently.
    """
    family, bases = settings.family, settings.family.rope_bases
    theta = settings["rope_theta"] or settings["rotary_emb_base"]
    theta = theta or bases.get("full_attention", family.theta)
    arguments = _rotary(settings, rope_of(settings) or family.rope, theta)
    if bases and sliding_layers(settings):
        base = settings["rope_local_base_freq"] or bases["sliding_attention"]
        windowed = _rotary(settings, rope_of(settings, "sliding_attention"), base)
        if windowed != arguments:
            plain = {
                "rope_type": "linear",
                "factor": 1.0,
                "rope_theta": windowed["rotary_base"],
            }
            arguments["windowed_rope_parameters"] = windowed.get("rope_parameters", plain)
    return arguments


def _rotary(settings: Settings, rope: Mapping[str, Any], theta: float) -> dict[str, Any]:
    rope_type = rope_type_of(rope)
    theta = rope.get("rope_theta", theta)
    share = rope.get("partial_rotary_factor", settings[settings.family.rotary_share] or 1.0)
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": theta,
        # For `proportional`, the share determines which pairs have frequency 0; all are
        # rotated.
        "rotary_percent": 1.0 if rope_type == "proportional" else share,
    }
    if rope_type != "default":
        scaling = {key: value for key, value in rope.items() if key != "type"}
        # Next to the map it takes precedence, as in transformers.
        if (length := settings["original_max_position_embeddings"]) is not None:
            scaling["original_max_position_embeddings"] = length
        arguments["rope_parameters"] = scaling | {
            "rope_type": rope_type,
            "rope_theta": theta,
            "partial_rotary_factor": share,
        }
    return arguments


def unsupported_biases(spec: ModelSpec) -> str | None:
    """Why megatron-core cannot have biases in exactly these layers; None if it can."""
    if spec.attention_output_bias == spec.mlp_bias and (spec.qkv_bias or not spec.mlp_bias):
        return None
    return (
        "megatron-core gives the attention's output projection a bias only together with the "
        "MLP, and the MLP only together with query, key and value"
    )


def unsupported_activation(settings: Settings) -> str | None:
    """Why the Megatron model cannot compute the config's activation; None when it can."""
    if (name := activation(settings)) in HF_ACTIVATIONS:
        return None
    return f"the activation {name} has no counterpart in the Megatron model"


def first_reason(*reasons: str | None) -> str | None:
    """The first that is not None."""
    return next((reason for reason in reasons if reason is not None), None)
