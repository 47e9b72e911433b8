"""Common parts of the families' translation of a config to megatron-core's terms."""

from collections.abc import Mapping
from typing import Any

from toolkit.models.families.tensors import Heads, TensorMap, by_rows, whole
from toolkit.models.model import Config
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


def transformer(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """The same with those that follow from the keys that several families have."""
    fields = transformer_sizes(spec) | {
        "attention_dropout": float(config["attention_dropout"] or config["attn_pdrop"] or 0),
        "hidden_dropout": float(config["hidden_dropout"] or config["resid_pdrop"] or 0),
        "layernorm_epsilon": _first_of(
            config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"
        ),
        "activation_func": HF_ACTIVATIONS.get(activation(config)),
        **_sliding_window(config, spec),
    }
    if config["no_rope_layers"] is not None:
        fields["no_rope_freq"] = [int(not turned) for turned in config["no_rope_layers"]]
    return fields


def _sliding_window(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """TransformerConfig fields of sliding-window attention; empty when no layer has it.

    transformers counts the query itself among the window's keys, Megatron only those
    before it.
    """
    if not spec.sliding_layers or spec.sliding_window is None or spec.chunked:
        return {}
    fields: dict[str, Any] = {"window_size": (spec.sliding_window - 1, 0)}
    if spec.sliding_layers < spec.layers:
        fields["window_attn_skip_freq"] = [
            int(kind == "sliding_attention") for kind in config["layer_types"]
        ]
    return fields


def gpt_sizes(spec: ModelSpec) -> dict[str, Any]:
    """The GPTModel arguments that follow from a model's shape alone."""
    return {
        "vocab_size": spec.vocab,
        "max_sequence_length": spec.max_positions,
        "share_embeddings_and_output_weights": spec.tied_embeddings,
    }


def gpt(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """The GPTChunk arguments, positions included."""
    if spec.learned_positions:
        return gpt_sizes(spec) | {"position_embedding_type": "learned_absolute"}
    return gpt_sizes(spec) | _rotary_of_layers(config, spec)


def activation(config: Config) -> str:
    """transformers' name of the MLP's activation."""
    return str(_first_of(config, "hidden_activation", "activation_function", "hidden_act"))


def _first_of(config: Config, *keys: str) -> Any:
    """The value of the first of these keys that the config has."""
    return next(value for key in keys if (value := config[key]) is not None)


def padding_token(config: Config, spec: ModelSpec) -> int | None:
    """The token whose input embedding transformers does not train."""
    token: int | None = config["pad_token_id"]
    # torch counts a negative index from the end.
    return None if token is None else token % spec.vocab


def heads_of(spec: ModelSpec) -> Heads:
    """The attention heads of a layer."""
    return Heads(spec.heads, spec.kv_heads, spec.head_dim)


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


def rope_of(config: Config) -> Mapping[str, Any]:
    """The map of rotary settings, completed by transformers; that of layers with full attention
    where layers rotate differently. Empty without rotary positions."""
    rope: Mapping[str, Any] = config["rope_parameters"] or {}
    full: Mapping[str, Any] = rope.get("full_attention", rope)
    return full


def rope_type_of(config: Config) -> str:
    """The variant of rotary positions."""
    return str(rope_of(config).get("rope_type", "default"))


def frequencies_limit(config: Config) -> int | None:
    """Up to which length the rotary frequencies of transformers' model do not depend on the
    longest sequence that it computes; None: up to any."""
    limit: int | None = config["max_position_embeddings"]
    if rope_type_of(config) == "longrope":
        named = "original_max_position_embeddings"
        limit = config[named] or rope_of(config).get(named, limit)
    return limit if rope_type_of(config) in ("dynamic", "longrope") else None


def _rotary_of_layers(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """GPTChunk arguments of rotary positions.

    `rope_parameters` is the complete map from which transformers computes the frequencies; it
    is omitted if every pair has the default frequencies, which are megatron-core's own.
    `windowed_rope_parameters` is that of sliding layers, if they rotate differently.
    """
    arguments = _rotary(config, rope_of(config))
    sliding = config["rope_parameters"].get("sliding_attention")
    if sliding is None or not spec.sliding_layers:
        return arguments
    windowed = _rotary(config, sliding)
    if windowed != arguments:
        theta = windowed["rotary_base"]
        plain = {"rope_type": "linear", "factor": 1.0, "rope_theta": theta}
        arguments["windowed_rope_parameters"] = windowed.get("rope_parameters", plain)
    return arguments


def _rotary(config: Config, rope: Mapping[str, Any]) -> dict[str, Any]:
    rope_type, share = rope["rope_type"], rope.get("partial_rotary_factor", 1.0)
    arguments: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        # For `proportional`, the share determines which pairs have frequency 0; all are
        # rotated.
        "rotary_percent": 1.0 if rope_type == "proportional" else share,
    }
    if rope_type != "default":
        scaling = {key: value for key, value in rope.items() if key != "type"}
        scaling["partial_rotary_factor"] = share
        # Next to the map it takes precedence, as in transformers.
        if (length := config["original_max_position_embeddings"]) is not None:
            scaling["original_max_position_embeddings"] = length
        arguments["rope_parameters"] = scaling
    return arguments


# --- what megatron-core cannot compute ----------------------------------------------------


def bias_reason(spec: ModelSpec) -> str | None:
    """Why megatron-core cannot have biases in exactly these layers; None if it can."""
    if spec.attention_output_bias == spec.mlp_bias and (spec.qkv_bias or not spec.mlp_bias):
        return None
    return (
        "megatron-core gives the attention's output projection a bias only together with the "
        "MLP, and the MLP only together with query, key and value"
    )


def activation_reason(config: Config) -> str | None:
    """Why the Megatron model cannot compute the config's activation; None when it can."""
    if (name := activation(config)) in HF_ACTIVATIONS:
        return None
    return f"the activation {name} has no counterpart in the Megatron model"
