"""The arguments of megatron-core's classes that follow from a config and a shape."""

from collections.abc import Iterator, Mapping
from typing import Any

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
    """The TransformerConfig fields that follow from a model's shape alone. No dropout."""
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
    """TransformerConfig fields, also those that follow from keys of several families."""
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
    """TransformerConfig fields of sliding-window attention. Empty when no layer has it.

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
    return gpt_sizes(spec) | _rotary(config, spec)


def activation(config: Config) -> str:
    """transformers' name of the MLP's activation."""
    return str(_first_of(config, "hidden_activation", "activation_function", "hidden_act"))


def _first_of(config: Config, *keys: str) -> Any:
    """The value of the first of these keys that the config has."""
    return next(value for key in keys if (value := config[key]) is not None)


def padding_token(config: Config, spec: ModelSpec) -> int | None:
    """The token whose input embedding transformers does not train."""
    token: int | None = config["pad_token_id"]
    if token is None or config["model_type"] in ("gpt2", "gpt_neox"):  # these train all tokens
        return None
    return token % spec.vocab  # torch counts a negative index from the end


# --- rotary positions -------------------------------------------------------------------


def rope_of(config: Config) -> Mapping[str, Any]:
    """The map of rotary settings, completed by transformers. If layers rotate differently, that
    of layers with full attention. Empty without rotary positions."""
    rope: Mapping[str, Any] = config["rope_parameters"] or {}
    full: Mapping[str, Any] = rope.get("full_attention", rope)
    return full


def rope_type_of(config: Config) -> str:
    """The variant of rotary positions."""
    return str(rope_of(config).get("rope_type", "default"))


def frequencies_limit(config: Config) -> int | None:
    """Up to which length the rotary frequencies of transformers' model do not depend on the
    longest sequence that it computes. None: up to any."""
    limit: int | None = config["max_position_embeddings"]
    if rope_type_of(config) == "longrope":
        named = "original_max_position_embeddings"
        limit = config[named] or rope_of(config).get(named, limit)
    return limit if rope_type_of(config) in ("dynamic", "longrope") else None


def _rotary(config: Config, spec: ModelSpec) -> dict[str, Any]:
    """GPTChunk arguments of rotary positions.

    `rope_parameters` is the complete map from which transformers computes the frequencies.
    `windowed_rope_parameters` is that of sliding layers, if they rotate differently.
    """
    arguments = {
        "position_embedding_type": "rope",
        "rope_parameters": _complete(config, rope_of(config)),
    }
    sliding = config["rope_parameters"].get("sliding_attention")
    if sliding is not None and spec.sliding_layers:
        windowed = _complete(config, sliding)
        if windowed != arguments["rope_parameters"]:
            arguments["windowed_rope_parameters"] = windowed
    return arguments


def _complete(config: Config, rope: Mapping[str, Any]) -> dict[str, Any]:
    plain = ("rope_type", "rope_theta")
    known = plain if rope["rope_type"] == "default" else rope.keys() - {"type"}
    found = {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0)}
    found |= {key: rope[key] for key in known}
    # Next to the map it takes precedence, as in transformers.
    length = config["original_max_position_embeddings"]
    if length is not None and rope["rope_type"] != "default":
        found["original_max_position_embeddings"] = length
    return found


# --- what megatron-core cannot compute ----------------------------------------------------


def reasons(config: Config, spec: ModelSpec) -> Iterator[str]:
    """Why megatron-core cannot compute the config of any family exactly."""
    if config["scale_attn_by_inverse_layer_idx"]:
        yield "the Megatron model does not scale attention by the inverse layer number"
    if spec.learned_positions and config["embd_pdrop"] != config["resid_pdrop"]:
        yield "megatron-core has one dropout for both: embd_pdrop must equal resid_pdrop"
    if not spec.learned_positions and config["resid_pdrop"]:
        yield "resid_pdrop: megatron-core's dropout of the residual also drops embeddings"
    if spec.attention_output_bias != spec.mlp_bias or (spec.mlp_bias and not spec.qkv_bias):
        yield (
            "megatron-core gives the attention's output projection a bias only together with "
            "the MLP, and the MLP only together with query, key and value"
        )
    if (name := activation(config)) not in HF_ACTIVATIONS:
        yield f"the activation {name} has no counterpart in the Megatron model"
