"""The keys of a Hugging Face `config.json`: which ones a model family has, and their types.

Names and defaults are those of the transformers config class of the same `model_type`. They are
in families/keys.json, so that checking a recipe imports neither torch nor transformers; a test
compares the file with the real classes, and rewrites it if DMT_UPDATE_GOLDEN is set. A key's
type follows from its name and default.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST_SIZE = 2**31 - 1
"""Largest number accepted in a config whose key is not in `LARGEST`."""

LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 10_000,  # DeepNet (arXiv:2203.00555): 1,000
    "hidden_size": 1_000_000,  # Megatron-LM's 1T (arXiv:2104.04473): 25,600
    "intermediate_size": 10_000_000,  # the same model: 102,400
    "n_inner": 10_000_000,
    "moe_intermediate_size": 10_000_000,
    "num_attention_heads": 10_000,  # the same model: 160
    "num_key_value_heads": 10_000,
    "head_dim": 100_000,  # gemma2: 256
    "vocab_size": 100_000_000,  # XLM-V (arXiv:2301.10472): 1,000,000
    "num_experts": 100_000,  # Switch-C (arXiv:2101.03961): 2,048
    "num_experts_per_tok": 100_000,
    "max_position_embeddings": 1_000_000_000,  # Llama 4 Scout: 10,485,760
}
"""Largest sizes accepted, by standard key, with the largest published one where it is known: a
larger number is a mistake, and counting per layer would take minutes."""


@dataclass(frozen=True)
class Kind:
    """A type with a range: what it accepts and its description."""

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
PROBLEM = _one_of("regression", "single_label_classification", "multi_label_classification")
SWITCHES = Kind(
    "list of 0 and 1, one per layer",
    lambda v: isinstance(v, list) and all(_is_int(one) and one in (0, 1) for one in v),
)


def _layer_types(*names: str) -> Kind:
    kinds = _one_of(*names)
    return Kind(f"list of {' and '.join(names)}, one per layer", lambda v: _all(v, kinds))


LAYER_TYPES = _layer_types("full_attention", "sliding_attention")
CHUNKED_TYPES = _layer_types("full_attention", "chunked_attention")
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
    empty_is_default: bool = False
    """An empty list is equivalent to a missing key."""


_KINDS: Mapping[str, Kind] = {
    name: kind
    for kind, *names in (
        (ACTIVATION, "activation_function", "hidden_act", "hidden_activation"),
        (COUNT, "chunk_size_feed_forward", "first_k_dense_replace", "max_window_layers"),
        (COUNT, "num_mtp_layers"),
        (DTYPE, "dtype", "torch_dtype"),
        (FALSE, "add_cross_attention", "is_encoder_decoder", "use_bidirectional_attention"),
        (FLOAT, "attn_scale", "router_aux_loss_coef", "router_jitter_noise"),
        (LAYERS, "mlp_only_layers", "moe_layers"),
        (LAYER_TYPES, "layer_types"),
        (MAP, "id2label", "label2id", "task_specific_params"),
        (MAP, "rope_parameters", "rope_scaling"),
        (POSITIVE, "attention_multiplier", "embedding_multiplier", "residual_multiplier"),
        (POSITIVE, "logits_scaling", "rope_local_base_freq", "rope_theta", "rotary_emb_base"),
        (POSITIVE_FLOAT, "attn_logit_softcapping", "final_logit_softcapping"),
        (PROBLEM, "problem_type"),
        (SWITCHES, "no_rope_layers"),
        (TEXT, "_name_or_path", "cache_implementation", "model_type", "summary_activation"),
        (TEXT, "summary_type", "transformers_version"),
        (TEXTS, "architectures"),
        (TOKEN, "bos_token_id", "pad_token_id"),
        (TOKENS, "eos_token_id"),
        (UNIT_FLOAT, "initializer_range", "partial_rotary_factor", "rotary_pct"),
    )
    for name in names
}
"""Types that do not follow from the default."""

_NEVER_NULL = (
    "attention_chunk_size", "attention_dropout", "first_k_dense_replace", "n_group",
    "norm_topk_prob", "num_experts_per_tok", "rope_interleave", "topk_group", "v_head_dim",
)  # fmt: skip
"""Keys whose null the config classes accept, and the models do not."""


def _kind(name: str, default: object) -> Kind:
    if (kind := _KINDS.get(name)) is not None:
        return kind
    if name.endswith(("dropout", "pdrop")):
        return DROPOUT
    if isinstance(default, bool):
        return FLAG
    return POSITIVE_FLOAT if isinstance(default, float) else SIZE


FILE = Path(__file__).parent / "families" / "keys.json"
_CLASSES: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
_OF_EVERY_CONFIG: Mapping[str, Any] = {
    "model_type": None, "_name_or_path": None, "output_attentions": False,
    "torch_dtype": Key(DTYPE, nullable=True),
}  # fmt: skip
"""Keys of published configs that no config class lists."""
GENERIC = frozenset({*_CLASSES["base"]["defaults"], *_OF_EVERY_CONFIG, "use_cache"})
"""Keys that every family has and that say nothing about the model's function."""
ROPE: Mapping[str, Any] = {"rope_theta": None, "rope_scaling": Key(MAP, nullable=True)}
"""Other spellings of what is in `rope_parameters`."""


def keys_of(model_type: str, **own: Any) -> Mapping[str, Key]:
    """The keys of a family with this `model_type` in transformers.

    `own`: keys of published configs that the config class does not list, with the default that
    the model assumes, or as a `Key`; a `Key` may also replace that of the class.
    """
    table = _CLASSES[model_type]
    nullable = {*table["nullable"]}.difference(_NEVER_NULL)
    keys = {
        name: Key(_kind(name, default), default, name in nullable)
        for name, default in table["defaults"].items()
    }
    rope = ROPE if "rope_parameters" in keys else {}
    for name, value in {**_OF_EVERY_CONFIG, **rope, **own}.items():
        keys[name] = value if isinstance(value, Key) else Key(_kind(name, value), value)
    return keys


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
    "proportional": (),
}
"""Rotary variants and the keys that each one needs."""

ROPE_READS: Mapping[str, tuple[str, ...]] = {
    "yarn": (
        "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"
    ),
    "longrope": ("factor", "attention_factor"),
    "proportional": ("factor",),
}  # fmt: skip
"""Additional keys of a rotary variant, besides those of `ROPE_COMMON`."""

ROPE_COMMON = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor",
    "original_max_position_embeddings",
)  # fmt: skip
"""Keys of every rotary variant; the last one also occurs in published configs where it is not
read."""

_DROPOUT = re.compile(r"(?!classifier|summary).*(dropout|pdrop|layerdrop)")


def is_dropout(name: str) -> bool:
    """Whether this config key is a dropout probability; these are 0 unless the recipe sets
    them."""
    return _DROPOUT.match(name) is not None


def is_attention_dropout(name: str) -> bool:
    """Whether it is one of attention's weights."""
    return is_dropout(name) and "att" in name


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
