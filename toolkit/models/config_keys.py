"""The keys of a Hugging Face `config.json`, per model family: type, range and default.

The defaults are those of the transformers config class of the same `model_type`. The
table is static, so that checking a recipe imports neither torch nor transformers; tests
compare it with the real classes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LARGEST_SIZE = 2**31 - 1
"""Largest dimension accepted, far above any real one: a larger number is a mistake."""


@dataclass(frozen=True)
class Kind:
    """A type with a range: what it accepts and how to say so."""

    allowed: str
    accepts: Callable[[Any], bool]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or isinstance(value, float)


def _one_of(*names: str) -> Kind:
    return Kind("one of " + ", ".join(names), lambda v: isinstance(v, str) and v in names)


# Floats are compared with both bounds, which refuses NaN; an int where transformers'
# strict config classes want a float is refused there too, so it is refused here.
SIZE = Kind(
    f"whole number from 1 to {LARGEST_SIZE}", lambda v: _is_int(v) and 1 <= v <= LARGEST_SIZE
)
COUNT = Kind(
    f"whole number from 0 to {LARGEST_SIZE}", lambda v: _is_int(v) and 0 <= v <= LARGEST_SIZE
)
TOKEN = Kind("token id (whole number, -1 or more)", lambda v: _is_int(v) and v >= -1)
TOKENS = Kind(
    "token id or list of token ids",
    lambda v: all(map(TOKEN.accepts, v)) if isinstance(v, list) else TOKEN.accepts(v),
)
LAYERS = Kind("list of layer numbers, 0 or more", lambda v: _all(v, COUNT))
POSITIVE_FLOAT = Kind(
    "decimal number above 0, e.g. 1.0e-5", lambda v: isinstance(v, float) and 0 < v < 1e30
)
FLOAT = Kind("decimal number, 0.0 or more", lambda v: isinstance(v, float) and 0 <= v < 1e30)
UNIT_FLOAT = Kind(
    "decimal number from 0.0 to 1.0", lambda v: isinstance(v, float) and 0 <= v <= 1
)
POSITIVE = Kind("number above 0", lambda v: _is_number(v) and 0 < v < 1e30)
NUMBERS = Kind("list of numbers above 0", lambda v: _all(v, POSITIVE))
DROPOUT = Kind("number from 0 to below 1", lambda v: _is_number(v) and 0 <= v < 1)
FLAG = Kind("true or false", lambda v: isinstance(v, bool))
FALSE = Kind("false (DMT trains decoder-only causal language models)", lambda v: v is False)
TEXT = Kind("text", lambda v: isinstance(v, str))
TEXTS = Kind("list of texts", lambda v: _all(v, TEXT))
MAP = Kind("map", lambda v: isinstance(v, Mapping))
DTYPE = _one_of("float32", "bfloat16", "float16")
LAYER_TYPES = Kind(
    "list of full_attention and sliding_attention, one per layer",
    lambda v: _all(v, _one_of("full_attention", "sliding_attention")),
)
ACTIVATION = _one_of(
    "silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python",
    "gelu_python_tanh", "gelu_accurate", "quick_gelu", "relu", "relu2", "relu6",
    "leaky_relu", "sigmoid", "tanh", "mish", "hardswish", "linear",
)  # fmt: skip
"""Activations of transformers that have no parameters of their own."""


def _all(value: object, kind: Kind) -> bool:
    return isinstance(value, list) and all(map(kind.accepts, value))


@dataclass(frozen=True)
class Key:
    """One config key: what it accepts, whether null is allowed, and its default."""

    kind: Kind
    default: Any = None
    nullable: bool = False


@dataclass(frozen=True)
class Family:
    """One `model_type`: its keys and the traits that no key states."""

    keys: Mapping[str, Key]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings that transformers accepts, and the key each one stands for."""
    strict_heads: bool = False
    """transformers refuses hidden_size % heads != 0 even where head_dim is given."""
    rotary: bool = True
    """Rotary position embedding (needs an even head size)."""

    def name_of(self, key: str) -> str:
        """This family's own spelling of a standard key (`hidden_size` → `n_embd`)."""
        return self.aliases.get(key, key)

    def spellings_of(self, own: str) -> list[str]:
        """The other spellings of this family's key `own`."""
        return [alias for alias, name in self.aliases.items() if name == own]


GENERIC: Mapping[str, Key] = {
    "model_type": Key(TEXT),
    "architectures": Key(TEXTS, nullable=True),
    "transformers_version": Key(TEXT, nullable=True),
    "dtype": Key(DTYPE, nullable=True),
    "torch_dtype": Key(DTYPE, nullable=True),
    "output_hidden_states": Key(FLAG, False, nullable=True),
    "output_attentions": Key(FLAG, False),
    "return_dict": Key(FLAG, True, nullable=True),
    "chunk_size_feed_forward": Key(COUNT, 0),
    "is_encoder_decoder": Key(FALSE, False),
    "id2label": Key(MAP, nullable=True),
    "label2id": Key(MAP, nullable=True),
    "problem_type": Key(
        _one_of("regression", "single_label_classification", "multi_label_classification"),
        nullable=True,
    ),
    "_name_or_path": Key(TEXT),
    "use_cache": Key(FLAG, True),
    "initializer_range": Key(UNIT_FLOAT, 0.02),
    "pad_token_id": Key(TOKEN, nullable=True),
    "bos_token_id": Key(TOKEN, nullable=True),
    "eos_token_id": Key(TOKENS, nullable=True),
    "tie_word_embeddings": Key(FLAG, False),
}
"""Keys that every family has; a family overrides a default where its own differs."""

_ROPE: Mapping[str, Key] = {
    "rope_theta": Key(POSITIVE),
    "rope_scaling": Key(MAP, nullable=True),
    "rope_parameters": Key(MAP, nullable=True),
}

_LLAMA: Mapping[str, Key] = {
    **GENERIC,
    **_ROPE,
    "vocab_size": Key(SIZE, 32000),
    "hidden_size": Key(SIZE, 4096),
    "intermediate_size": Key(SIZE, 11008),
    "num_hidden_layers": Key(SIZE, 32),
    "num_attention_heads": Key(SIZE, 32),
    "num_key_value_heads": Key(SIZE, nullable=True),
    "head_dim": Key(SIZE, nullable=True),
    "hidden_act": Key(ACTIVATION, "silu"),
    "max_position_embeddings": Key(SIZE, 2048),
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1e-6),
    "bos_token_id": Key(TOKEN, 1, nullable=True),
    "eos_token_id": Key(TOKENS, 2, nullable=True),
    "pretraining_tp": Key(SIZE, 1, nullable=True),
    "attention_bias": Key(FLAG, False),
    "attention_dropout": Key(DROPOUT, 0.0),
    "mlp_bias": Key(FLAG, False),
}


def _without(keys: Mapping[str, Key], *names: str) -> dict[str, Key]:
    return {name: key for name, key in keys.items() if name not in names}


_MISTRAL: Mapping[str, Key] = {
    **_without(_LLAMA, "pretraining_tp", "attention_bias", "mlp_bias"),
    "intermediate_size": Key(SIZE, 14336),
    "num_key_value_heads": Key(SIZE, 8),
    "max_position_embeddings": Key(SIZE, 131072),
    "sliding_window": Key(SIZE, 4096, nullable=True),
}

_MIXTRAL: Mapping[str, Key] = {
    **_MISTRAL,
    "rms_norm_eps": Key(POSITIVE_FLOAT, 1e-5),
    "sliding_window": Key(SIZE, nullable=True),
    "num_experts_per_tok": Key(SIZE, 2),
    "num_local_experts": Key(SIZE, 8),
    "output_router_logits": Key(FLAG, False),
    "router_aux_loss_coef": Key(FLOAT, 0.001),
    "router_jitter_noise": Key(FLOAT, 0.0),
}

_QWEN2: Mapping[str, Key] = {
    **_without(_LLAMA, "pretraining_tp", "attention_bias", "mlp_bias"),
    "vocab_size": Key(SIZE, 151936),
    "intermediate_size": Key(SIZE, 22016),
    "num_key_value_heads": Key(SIZE, 32, nullable=True),
    "head_dim": Key(SIZE),
    "max_position_embeddings": Key(SIZE, 32768),
    "bos_token_id": Key(TOKEN, nullable=True),
    "eos_token_id": Key(TOKENS, nullable=True),
    "use_sliding_window": Key(FLAG, False),
    "sliding_window": Key(SIZE, 4096, nullable=True),
    "max_window_layers": Key(COUNT, 28),
    "layer_types": Key(LAYER_TYPES, nullable=True),
}

_QWEN3: Mapping[str, Key] = {
    **_QWEN2,
    "head_dim": Key(SIZE, 128),
    "attention_bias": Key(FLAG, False),
}

_QWEN3_MOE: Mapping[str, Key] = {
    # Published qwen3_moe configs carry max_window_layers; transformers reads it nowhere.
    **_without(_QWEN3, "layer_types"),
    "hidden_size": Key(SIZE, 2048),
    "intermediate_size": Key(SIZE, 6144),
    "num_hidden_layers": Key(SIZE, 24),
    "num_key_value_heads": Key(SIZE, 4),
    "head_dim": Key(SIZE),
    "decoder_sparse_step": Key(SIZE, 1),
    "moe_intermediate_size": Key(SIZE, 768),
    "num_experts_per_tok": Key(SIZE, 8),
    "num_experts": Key(SIZE, 128),
    "norm_topk_prob": Key(FLAG, False),
    "output_router_logits": Key(FLAG, False),
    "router_aux_loss_coef": Key(FLOAT, 0.001),
    "mlp_only_layers": Key(LAYERS, nullable=True),
}

_GEMMA2: Mapping[str, Key] = {
    **_without(_LLAMA, "pretraining_tp", "mlp_bias"),
    "vocab_size": Key(SIZE, 256000),
    "hidden_size": Key(SIZE, 2304),
    "intermediate_size": Key(SIZE, 9216),
    "num_hidden_layers": Key(SIZE, 26),
    "num_attention_heads": Key(SIZE, 8),
    "num_key_value_heads": Key(SIZE, 4),
    "head_dim": Key(SIZE, 256),
    "hidden_act": Key(ACTIVATION),  # in published configs; transformers reads the next one
    "hidden_activation": Key(ACTIVATION, "gelu_pytorch_tanh"),
    "max_position_embeddings": Key(SIZE, 8192),
    "pad_token_id": Key(TOKEN, 0, nullable=True),
    "eos_token_id": Key(TOKENS, 1, nullable=True),
    "bos_token_id": Key(TOKEN, 2, nullable=True),
    "tie_word_embeddings": Key(FLAG, True),
    "query_pre_attn_scalar": Key(SIZE, 256),
    "sliding_window": Key(SIZE, 4096),
    "layer_types": Key(LAYER_TYPES, nullable=True),
    "final_logit_softcapping": Key(POSITIVE_FLOAT, 30.0, nullable=True),
    "attn_logit_softcapping": Key(POSITIVE_FLOAT, 50.0, nullable=True),
    "use_bidirectional_attention": Key(FALSE, nullable=True),
    "cache_implementation": Key(TEXT, nullable=True),
}

_GPT2: Mapping[str, Key] = {
    **GENERIC,
    "vocab_size": Key(SIZE, 50257),
    "n_positions": Key(SIZE, 1024),
    "n_ctx": Key(SIZE),  # in published configs; means n_positions
    "n_embd": Key(SIZE, 768),
    "n_layer": Key(SIZE, 12),
    "n_head": Key(SIZE, 12),
    "n_inner": Key(SIZE, nullable=True),
    "activation_function": Key(ACTIVATION, "gelu_new"),
    "resid_pdrop": Key(DROPOUT, 0.1),
    "embd_pdrop": Key(DROPOUT, 0.1),
    "attn_pdrop": Key(DROPOUT, 0.1),
    "layer_norm_epsilon": Key(POSITIVE_FLOAT, 1e-5),
    "summary_type": Key(TEXT, "cls_index"),
    "summary_use_proj": Key(FLAG, True),
    "summary_activation": Key(TEXT, nullable=True),
    "summary_proj_to_labels": Key(FLAG, True),
    "summary_first_dropout": Key(DROPOUT, 0.1),
    "scale_attn_weights": Key(FLAG, True),
    "bos_token_id": Key(TOKEN, 50256, nullable=True),
    "eos_token_id": Key(TOKENS, 50256, nullable=True),
    "scale_attn_by_inverse_layer_idx": Key(FLAG, False),
    "reorder_and_upcast_attn": Key(FLAG, False),
    "add_cross_attention": Key(FALSE, False),
    "task_specific_params": Key(MAP, nullable=True),
    "tie_word_embeddings": Key(FLAG, True),
}

_GPT_NEOX: Mapping[str, Key] = {
    **GENERIC,
    **_ROPE,
    "vocab_size": Key(SIZE, 50432),
    "hidden_size": Key(SIZE, 6144),
    "num_hidden_layers": Key(SIZE, 44),
    "num_attention_heads": Key(SIZE, 64),
    "intermediate_size": Key(SIZE, 24576),
    "hidden_act": Key(ACTIVATION, "gelu"),
    "rotary_pct": Key(UNIT_FLOAT, 0.25),
    "rotary_emb_base": Key(POSITIVE, 10000),
    "attention_dropout": Key(DROPOUT, 0.0),
    "hidden_dropout": Key(DROPOUT, 0.0),
    "classifier_dropout": Key(DROPOUT, 0.1),
    "max_position_embeddings": Key(SIZE, 2048),
    "layer_norm_eps": Key(POSITIVE_FLOAT, 1e-5),
    "bos_token_id": Key(TOKEN, 0, nullable=True),
    "eos_token_id": Key(TOKENS, 2, nullable=True),
    "use_parallel_residual": Key(FLAG, True),
    "attention_bias": Key(FLAG, True),
    "is_decoder": Key(FLAG, False),
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_LLAMA, strict_heads=True),
    "mistral": Family(_MISTRAL),
    "mixtral": Family(_MIXTRAL, {"num_experts": "num_local_experts"}),
    "qwen2": Family(_QWEN2),
    "qwen3": Family(_QWEN3),
    "qwen3_moe": Family(_QWEN3_MOE, {"num_local_experts": "num_experts"}),
    "gemma2": Family(_GEMMA2, strict_heads=True),
    "gpt2": Family(
        _GPT2,
        {
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        strict_heads=True,
        rotary=False,
    ),
    "gpt_neox": Family(_GPT_NEOX, strict_heads=True),
}

ROPE_VALUES: Mapping[str, Kind] = {
    "rope_type": TEXT,
    "type": TEXT,
    "rope_theta": POSITIVE,
    "partial_rotary_factor": UNIT_FLOAT,
    "factor": POSITIVE,
    "original_max_position_embeddings": SIZE,
    "attention_factor": POSITIVE,
    "beta_fast": POSITIVE,
    "beta_slow": POSITIVE,
    "mscale": POSITIVE,
    "mscale_all_dim": POSITIVE,
    "truncate": FLAG,
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "short_factor": NUMBERS,
    "long_factor": NUMBERS,
}
"""Keys inside `rope_scaling` and `rope_parameters`."""

ROPE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
}
"""Rotary variants and the keys that each one needs."""

DROPOUT_KEYS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "hidden_dropout",
    "resid_pdrop",
)
"""Dropout probabilities of the supported families; 0 unless the recipe sets them."""

FOREIGN_NAMES: Mapping[str, str] = {
    # Megatron-LM and megatron-core
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "padded_vocab_size": "vocab_size",
    "num_moe_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    # GPT-2, nanoGPT and Llama's original checkpoints
    "n_layer": "num_hidden_layers",
    "n_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_embd": "hidden_size",
    "dim": "hidden_size",
    "d_model": "hidden_size",
    "block_size": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "norm_eps": "rms_norm_eps",
}
"""Other programs' names for these settings, recognised in errors only."""
