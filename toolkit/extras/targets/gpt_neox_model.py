"""The model of a GPT-NeoX config, stated by sizes: transformers' gpt_neox or llama."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.engines.deepspeed.json_file import JsonFile
from toolkit.engines.megatron.config import trained_config
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets.values import value_in
from toolkit.models.families import settings_of
from toolkit.recipe.schema import Recipe
from toolkit.targets.base import (
    ForeignSetting,
    Leftover,
    NotCarried,
    Settings,
    SettingSource,
    Stated,
    Unknown,
    changes,
    relative_to_file,
)

_CONFIG = "model.config"
_TOKENIZERS = {
    "GPT2BPETokenizer": ("openai-community/gpt2", 50257),
    "20B_tokenizer.json": ("EleutherAI/gpt-neox-20b", 50277),
}
"""A type, or a file's name → where the same tokenizer is on the hub, and its tokens."""
_TYPES = {"gpt_neox": ("layernorm", "layernorm_epsilon", "layer_norm_eps", 1e-5),
          "llama": ("rmsnorm", "rms_norm_epsilon", "rms_norm_eps", 1e-8)}  # fmt: skip
"""transformers' model type → GPT-NeoX's norm, its epsilon, and what transformers calls that."""

_GELU = {False: "gelu", True: "gelu_pytorch_tanh"}

_SIZES = """
    num_layers hidden_size num_attention_heads num_kv_heads intermediate_size rotary_pct
    max_position_embeddings rotary_emb_base layernorm_epsilon rms_norm_epsilon
    hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by
    mlp_multiple_of
"""
NUMBERS = tuple(_SIZES.split())


class _Refused(Exception):
    """A setting, and what no model type has of it."""


def add_model(
    found: SettingSource, settings: Settings, file: JsonFile, recipe: Recipe | None
) -> None:
    """Add the model that the settings come to, if they state one.

    Raises RecipeError for a model that DMT has no type for, unless a recipe is compared.
    """
    if "num_layers" not in settings or "hidden_size" not in settings:
        return
    try:
        for name, key, value in _config(settings, file.path):
            at = settings.get(name)
            if at is None:
                if recipe is not None:
                    continue  # a default is compared only where it is stated
                at = ForeignSetting(f"{name} (default)", value, str(file.path))
            row = Leftover(at, value.reason) if isinstance(value, NotCarried) else value
            if isinstance(row, Leftover):
                found.leftovers.append(row)
            else:
                found.stated.append(Stated(key, row, at))
    except _Refused as error:
        name, allowed = error.args
        at = settings.get(name, ForeignSetting(name, "not stated", str(file.path)))
        if recipe is not None:
            found.unknown.append(Unknown(at.name, at.place, allowed))
            return
        place, _, line = at.place.rpartition(":")
        stated = (place, int(line)) if line.isdecimal() else (at.place, 0)
        raise RecipeError([Problem(name, at.written, allowed, "", *stated)]) from error


def _config(settings: Settings, path: Path) -> Iterator[tuple[str, str, Any]]:
    """Their name, our key and its value, for all that makes the model."""

    def get(name: str, default: Any = None) -> Any:
        return value_in(settings, name, default)

    kind = _model_type(settings)
    _, epsilon, ours, default = _TYPES[kind]
    heads = get("num_attention_heads")
    yield "norm", f"{_CONFIG}.model_type", kind
    yield "num_layers", f"{_CONFIG}.num_hidden_layers", get("num_layers")
    yield "hidden_size", f"{_CONFIG}.hidden_size", get("hidden_size")
    yield "num_attention_heads", f"{_CONFIG}.num_attention_heads", heads
    yield "intermediate_size", f"{_CONFIG}.intermediate_size", _intermediate(settings)
    positions = get("max_position_embeddings") or get("seq_length")
    yield "max_position_embeddings", f"{_CONFIG}.max_position_embeddings", positions
    yield epsilon, f"{_CONFIG}.{ours}", get(epsilon, default)
    yield "no_weight_tying", f"{_CONFIG}.tie_word_embeddings", not get("no_weight_tying", False)
    std = get("init_method_std", 0.02)
    if get("init_method", "normal") == "small_init":
        std = math.sqrt(2 / (5 * get("hidden_size")))
    elif get("init_method", "normal") != "normal":
        yield "init_method", "", changes("initial weights are normal, model.config."
                                         "initializer_range is their deviation")  # fmt: skip
    yield "init_method_std", f"{_CONFIG}.initializer_range", std
    base = get("rotary_emb_base", 10000)
    if kind == "llama":
        yield "rotary_emb_base", f"{_CONFIG}.rope_theta", float(base)
        yield "num_kv_heads", f"{_CONFIG}.num_key_value_heads", get("num_kv_heads") or heads
        biases = get("use_bias_in_attn_linear", True)
        yield "use_bias_in_attn_linear", f"{_CONFIG}.attention_bias", biases
        yield "attention_dropout", f"{_CONFIG}.attention_dropout", get("attention_dropout", 0.1)
        if get("hidden_dropout", 0.1):
            yield "hidden_dropout", "", changes("llama has no dropout of the residual")
    else:
        yield "rotary_emb_base", f"{_CONFIG}.rotary_emb_base", base
        yield "rotary_pct", f"{_CONFIG}.rotary_pct", get("rotary_pct", 1.0)
        parallel = get("gpt_j_residual", False)
        yield "gpt_j_residual", f"{_CONFIG}.use_parallel_residual", parallel
        # GPT-NeoX's fused gelu is the approximation by tanh.
        is_fused = get("bias_gelu_fusion", False)
        yield "bias_gelu_fusion", f"{_CONFIG}.hidden_act", _GELU[is_fused]
        for name in ("attention_dropout", "hidden_dropout"):
            yield name, f"{_CONFIG}.{name}", float(get(name, 0.1))
    yield from _vocabulary(settings, path)


def _model_type(settings: Settings) -> str:
    """Which of transformers' models it is. Raises _Refused where it is none."""

    def require(name: str, default: object, *allowed: object) -> None:
        if value_in(settings, name, default) not in allowed:
            words = " or ".join(str(value).lower() for value in allowed)
            raise _Refused(name, f"{words}: no model type has another")

    norm = value_in(settings, "norm", "layernorm")
    kind = next((kind for kind, row in _TYPES.items() if row[0] == norm), None)
    if kind is None:
        raise _Refused("norm", "layernorm or rmsnorm: no model type has another")
    require("pos_emb", "learned", "rotary")
    require("gpt_j_tied", False, False)
    if (
        value_in(settings, "moe_num_experts", 1) != 1
        or value_in(settings, "num_experts", 1) != 1
    ):
        raise _Refused("moe_num_experts", "1: its experts are GPT-NeoX's own")
    attention = value_in(settings, "attention_config") or []
    kinds = {word for words, _ in attention for word in words}
    if kinds - {"global", "flash"}:
        raise _Refused("attention_config", "global or flash: no model type has another")
    require("use_bias_in_norms", True, kind == "gpt_neox")
    if kind == "gpt_neox":
        require("activation", "gelu", "gelu")
        require("use_bias_in_attn_linear", True, True)
        require("num_kv_heads", None, None, value_in(settings, "num_attention_heads"))
    else:
        require("gpt_j_residual", False, False)
        require("rotary_pct", 1, 1)
        if value_in(settings, "mlp_type") != "llama":
            require("activation", "gelu", "swiglu")
    return kind


def _intermediate(settings: Settings) -> int:
    """The width of the MLP: of gate and of up projection where it has both."""
    hidden, stated = value_in(settings, "hidden_size"), value_in(settings, "intermediate_size")
    width = stated or int(value_in(settings, "expansion_factor", 4) * hidden)
    multiple = value_in(settings, "mlp_multiple_of", 1)
    if value_in(settings, "mlp_type") == "llama":
        if stated:
            return int(stated)
        width, multiple = int(8 * hidden / 3), 256
    elif value_in(settings, "activation") == "swiglu":
        width = int(width * 2 / 3) // 2
    return int(math.ceil(width / multiple) * multiple)


def _vocabulary(settings: Settings, path: Path) -> Iterator[tuple[str, str, Any]]:
    """The tokenizer, and the rows of the embedding: its tokens, rounded up."""
    kind = value_in(settings, "tokenizer_type", "GPT2BPETokenizer")
    named = Path(str(value_in(settings, "vocab_file", "")))
    hub, tokens = _TOKENIZERS.get(kind) or _TOKENIZERS.get(named.name) or (None, None)
    if hub is None and kind == "HFTokenizer" and named.name == "tokenizer.json":
        hub, tokens = str(named.parent), _tokens_in(relative_to_file(str(named), path))
    at = "vocab_file" if "vocab_file" in settings else "tokenizer_type"
    if hub is None:
        yield at, "", changes(f"state data.tokenizer and model.config.vocab_size for {kind}")
        return
    yield at, "data.tokenizer", hub
    if tokens is None:
        yield at, "", changes("state model.config.vocab_size: the file is not on this machine")
        return
    multiple = value_in(settings, "make_vocab_size_divisible_by", 128)
    multiple *= value_in(settings, "model_parallel_size", 1)
    rows = math.ceil(tokens / multiple) * multiple
    yield "make_vocab_size_divisible_by", f"{_CONFIG}.vocab_size", rows


def _tokens_in(file: Path) -> int | None:
    """The tokens of a Hugging Face `tokenizer.json`; None if it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        added = {token["content"] for token in content.get("added_tokens", ())}
        return len(added | {*content["model"]["vocab"]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def problems(recipe: Recipe) -> Iterator[Problem]:
    """Models that GPT-NeoX has no words for."""
    config = settings_of(trained_config(recipe.model))
    kind = config["model_type"]
    if kind not in _TYPES:
        yield Problem("model", kind, "in GPT-NeoX, gpt_neox or llama")
        return
    scaling = config["rope_scaling"] or config["rope_parameters"] or {}
    if scaling.get("rope_type", "default") != "default":
        yield Problem("model", f"rope scaling {scaling['rope_type']}", "in GPT-NeoX, none")
    if kind == "gpt_neox" and config["hidden_act"] not in (
        *_GELU.values(),
        "gelu_new",
        "gelu_fast",
    ):
        yield Problem("model.config.hidden_act", config["hidden_act"], "in GPT-NeoX, gelu")
    if recipe.data.tokenizer == "bytes":
        yield Problem("data.tokenizer", "bytes", "in GPT-NeoX, one of Hugging Face")
    if recipe.model.init != "random":
        yield Problem("model.init", recipe.model.init, "in GPT-NeoX, random: it reads its own "
                      "checkpoints, which DMT does not write")  # fmt: skip


def written(recipe: Recipe, tensor: int) -> dict[str, object]:
    """The model's settings."""
    config = settings_of(trained_config(recipe.model))
    kind = config["model_type"]
    norm, epsilon, ours, _ = _TYPES[kind]
    inner = config["intermediate_size"]
    values = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": config["num_attention_heads"],
        "max_position_embeddings": config["max_position_embeddings"],
        "norm": norm,
        epsilon: config[ours],
        "pos_emb": "rotary",
        "no_weight_tying": not config["tie_word_embeddings"],
        "init_method": "normal",
        "init_method_std": config["initializer_range"],
        "attention_dropout": config["attention_dropout"],
        "make_vocab_size_divisible_by": math.ceil(config["vocab_size"] / tensor),
    }
    if kind == "llama":
        values |= {
            "activation": "swiglu",
            "intermediate_size": 3 * inner,  # of which GPT-NeoX takes a third for each half
            "num_kv_heads": config["num_key_value_heads"],
            "rotary_emb_base": int(config["rope_theta"]),
            "use_bias_in_norms": False,
            "use_bias_in_attn_linear": config["attention_bias"],
            "hidden_dropout": 0.0,
        }
    else:
        values |= {
            "intermediate_size": inner,
            "rotary_pct": config["rotary_pct"],
            "rotary_emb_base": config["rotary_emb_base"],
            "gpt_j_residual": config["use_parallel_residual"],
            "bias_gelu_fusion": config["hidden_act"] != "gelu",
            "hidden_dropout": config["hidden_dropout"],
        }
    return values | _tokenizer(recipe)


def _tokenizer(recipe: Recipe) -> dict[str, object]:
    hub = recipe.data.tokenizer
    known = next((name for name, (where, _) in _TOKENIZERS.items() if where == hub), None)
    if known == "GPT2BPETokenizer":
        return {"tokenizer_type": known}
    return {"tokenizer_type": "HFTokenizer", "vocab_file": known or f"{hub}/tokenizer.json"}
