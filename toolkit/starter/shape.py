"""A Hugging Face config of a model that is described in megatron-core's terms."""

from collections.abc import Mapping
from typing import Any

from toolkit.engines.deepspeed.config import same
from toolkit.models.families import common, megatron_model, model_spec, unsupported

_NOT_OF_A_CONFIG = frozenset(
    (
        "kv_channels",
        "max_sequence_length",
        "bias_activation_fusion",
        # Of the loss, not of the model.
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_token_dispatcher_type",
    )
)
"""Fields that follow from others, or from the lengths of a run."""
VOCABULARY = 50304
"""GPT-2's tokens, padded as Megatron-LM does: where the arguments leave it to the tokenizer."""


def config_of_shape(shape: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, object]]:
    """The config of the closest model type, and by field what that model has instead."""
    config = _llama(shape) if shape.get("gated_linear_unit") else _gpt2(shape)
    made: dict[str, object] = {}
    if unsupported(config) is None:
        model = megatron_model(config)
        made = {**model.transformer, **model.gpt}
    else:
        spec = model_spec(config)
        made = {**common.transformer_sizes(spec), **common.gpt_sizes(spec)}
    different = {
        name: made.get(name)
        for name, value in shape.items()
        if name not in _NOT_OF_A_CONFIG and not same(value, made.get(name))
    }
    return config, different


def _llama(shape: Mapping[str, Any]) -> dict[str, Any]:
    """Llama, or what has its layers and more: Mixtral, Qwen2 and Qwen3."""
    heads = shape.get("num_attention_heads", 32)
    experts = shape.get("num_moe_experts")
    kind = "qwen2" if shape.get("add_qkv_bias") else "llama"
    kind = "qwen3" if shape.get("qk_layernorm") else kind
    config: dict[str, Any] = {
        "model_type": "mixtral" if experts else kind,
        "vocab_size": shape.get("vocab_size", VOCABULARY),
        "hidden_size": shape.get("hidden_size"),
        "intermediate_size": shape.get("ffn_hidden_size"),
        "num_hidden_layers": shape.get("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": shape.get("num_query_groups", heads),
        "max_position_embeddings": shape.get("max_sequence_length", 4096),
        "rms_norm_eps": shape.get("layernorm_epsilon", 1e-5),
        "rope_theta": float(shape.get("rotary_base", 10000)),
        "tie_word_embeddings": shape.get("share_embeddings_and_output_weights", True),
    }
    if kind != "qwen2" and "kv_channels" in shape:
        config["head_dim"] = shape["kv_channels"]
    if experts:
        config |= {
            "num_local_experts": experts,
            "num_experts_per_tok": shape.get("moe_router_topk", 2),
        }
    return {key: value for key, value in config.items() if value is not None}


def _gpt2(shape: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-2; GPT-NeoX where positions are rotary."""
    hidden = shape.get("hidden_size")
    config: dict[str, Any] = {
        "vocab_size": shape.get("vocab_size", VOCABULARY),
        "tie_word_embeddings": shape.get("share_embeddings_and_output_weights", True),
    }
    if shape.get("position_embedding_type") == "rope":
        config |= {
            "model_type": "gpt_neox",
            "hidden_size": hidden,
            "intermediate_size": shape.get("ffn_hidden_size", 4 * (hidden or 0)),
            "num_hidden_layers": shape.get("num_layers"),
            "num_attention_heads": shape.get("num_attention_heads"),
            "max_position_embeddings": shape.get("max_sequence_length", 2048),
            "rotary_pct": shape.get("rotary_percent", 1.0),
            "use_parallel_residual": False,
            "hidden_act": "gelu",
        }
    else:
        config |= {
            "model_type": "gpt2",
            "n_embd": hidden,
            "n_inner": shape.get("ffn_hidden_size"),
            "n_layer": shape.get("num_layers"),
            "n_head": shape.get("num_attention_heads"),
            "n_positions": shape.get("max_sequence_length", 1024),
            "resid_pdrop": shape.get("hidden_dropout", 0.1),
            "embd_pdrop": shape.get("hidden_dropout", 0.1),
            "attn_pdrop": shape.get("attention_dropout", 0.1),
        }
    return {key: value for key, value in config.items() if value is not None}
