"""Judges a config by transformers' own classes: they build it, and its model without storage.

Nothing here raises: for any values the result is a list of problems, or the model. Our own are
the rules that transformers has not: names of other programs, one name for one setting, finite
sizes, heads that divide the hidden size, and decoders alone.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, replace
from functools import cache
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from toolkit.errors import Problem
from toolkit.models.counting import count
from toolkit.models.families import FAMILIES
from toolkit.models.model import Model
from toolkit.text.suggest import did_you_mean

model_types = frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every `model_type` of which transformers has a causal language model."""
_PUBLISHED = (
    "torch_dtype", "use_cache", "model_type", "_name_or_path", "rope_parameters", "rope_theta",
    "rope_scaling", "output_attentions",
)  # fmt: skip
"""Keys of published configs that no config class lists."""
_LOOKED_UP = 100
"""Unknown keys that are compared with the known ones. More would take seconds."""
_REPEATED = re.compile("layer|expert|block")
"""A size of what a model holds one after another: building more would take minutes."""
_FALSE = ("is_encoder_decoder", "add_cross_attention", "use_bidirectional_attention")
_ROPE = ("rope_scaling", "rope_parameters", "rope_theta")
_HEADS = ("hidden_size", "num_attention_heads", "num_key_value_heads")
_SIZES = (*_HEADS, "vocab_size", "num_hidden_layers", "max_position_embeddings")
_RULES = ("transformers.modeling_rope_utils", "transformers.configuration_utils")
"""Modules whose warnings are of a config's values."""
_MISTAKE = re.compile("Unrecognized keys")
"""Warnings that published models do not cause."""

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
    "norm_eps": "rms_norm_eps",
}
"""Other programs' names for these settings, recognised in errors only."""


def examine(config: Mapping[str, Any]) -> tuple[list[Problem], Model | None]:
    """Every mistake in a config. Its model if there is none."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types:
        found = shown(model_type) if "model_type" in config else "nothing"
        allowed = ", ".join(sorted(FAMILIES)) + ", or another decoder of transformers"
        names = sorted(model_types) if isinstance(model_type, str) else []
        return [Problem("model_type", found, allowed, did_you_mean(model_type, names))], None
    problems = [*_own_problems(config, model_type), *_joint_problems(config, model_type)]
    wrong = {problem.key for problem in problems}
    usable = {key: value for key, value in config.items() if key not in wrong}
    usable = {key: value for key, value in usable.items() if isinstance(key, str)}
    with _warnings() as warned:
        built = _built(usable, problems)
        if built is not None:
            problems += _of_kind(built)
        if built is None or problems:
            return [*problems, *_warned(usable, warned)], None
        try:
            model = count(built, usable, strict=model_type in FAMILIES)
        except Exception as error:  # noqa: BLE001 - a model's own code raises what it likes
            problem = _refused(usable, error)
            allowed = problem.allowed.replace("accepts", "computes", 1)
            return [replace(problem, allowed=allowed)], None
    return [*_warned(usable, warned)], model


@cache
def known_keys(model_type: str) -> frozenset[str]:
    """Every key that transformers reads in a config of this type, under every spelling."""
    if model_type not in model_types:
        return frozenset()
    config = CONFIG_MAPPING[model_type]
    names = {field.name for field in fields(config)}.union(*config.attribute_map.items())
    try:
        defaults = config().to_dict()
    except Exception:  # noqa: BLE001 - some classes refuse their own defaults
        defaults = {}
    return frozenset((*_PUBLISHED, *names, *_read_keys(config), *defaults))


def base_keys() -> frozenset[str]:
    """Keys of every config, which say nothing about the model's function."""
    return frozenset((*_PUBLISHED[:4], *PretrainedConfig().to_dict())) - {"model_type"}


def _read_keys(config: type) -> list[str]:
    """Keys that the model reads although its config class does not list them (`head_dim`), and
    that the class takes under an older name (`rotary_pct`)."""
    reads = r'(?:getattr\((?:self\.)?config, |kwargs\.(?:pop|get|setdefault)\()"(\w+)"'
    return re.findall(reads, _source(config))


@cache
def _source(config: type) -> str:
    """The code of a config class and of its model."""
    names = (config.__module__, config.__module__.replace(".configuration_", ".modeling_"))
    found = [module for name in names if (module := find_spec(name)) and module.origin]
    return "".join(Path(str(module.origin)).read_text(encoding="utf-8") for module in found)


def _own_problems(config: Mapping[str, Any], model_type: str) -> Iterator[Problem]:
    known, aliases = known_keys(model_type), CONFIG_MAPPING[model_type].attribute_map
    sizes = {aliases.get(name, name) for name in _SIZES}
    for index, (name, value) in enumerate(config.items()):
        own = aliases.get(name, name) if isinstance(name, str) else name
        most = 10_000 if _REPEATED.search(str(name)[:80]) else 10**9
        if name not in known:
            yield _unknown_key(name, known, model_type, look_up=index < _LOOKED_UP)
        elif own != name and own in config:
            both = f"both {name} and {own}"
            yield Problem(name, both, "one name for one setting", f"remove {name}")
        elif isinstance(value, float) and not isfinite(value):
            yield Problem(name, shown(value), "a finite number")
        elif isinstance(value, int) and abs(value) > most:
            yield Problem(name, shown(value), f"at most {most:,}, more than any model has")
        elif own in sizes and isinstance(value, int) and value < 1:
            yield Problem(name, shown(value), "a whole number from 1")
        elif name in _FALSE and value:
            allowed = "false (DMT trains decoder-only causal language models)"
            yield Problem(name, shown(value), allowed)


def _unknown_key(
    name: object, known: frozenset[str], model_type: str, *, look_up: bool
) -> Problem:
    foreign = FOREIGN_NAMES.get(name, "") if isinstance(name, str) else ""
    own = CONFIG_MAPPING[model_type].attribute_map.get(foreign, foreign)
    fix = f"did you mean `{own}`?" if foreign in known else ""
    return Problem(
        name if isinstance(name, str) and len(name) <= 80 else shown(name),
        "an unknown key",
        f"the keys of transformers' {model_type} config",
        fix or (did_you_mean(name, sorted(known)) if look_up else ""),
    )


def _built(config: dict[str, Any], problems: list[Problem]) -> PretrainedConfig | None:
    """transformers' config without the keys that it refuses, which are added to `problems`.
    None if it refuses another thing."""
    while True:
        try:
            return AutoConfig.for_model(**deepcopy(config))
        except Exception as error:  # noqa: BLE001 - a strict config class raises what it likes
            problem = _refused(config, error)
            joint = problem.key == "model_type" or "Class validation" in str(error)
            if not joint or not problems:
                problems.append(problem)
            if joint:
                return None
            config.pop(problem.key)


def _refused(config: Mapping[str, Any], error: object) -> Problem:
    """transformers' message, under the first key that it names."""
    text = " ".join(str(error).split())
    words = re.findall(r"\w+", text.replace("Padding_idx", "pad_token_id"))
    words += _ROPE if re.search("rope|rotary", text, re.IGNORECASE) else ()
    for key, value in config.items():
        values = value.values() if isinstance(value, Mapping) else (value,)
        if key != "model_type" and any(isinstance(v, str) and v in words for v in values):
            words.append(key)
    key = next((word for word in words if word in config), "model_type")
    found = f"{shown(config[key])}: {text[:300]}"
    return Problem(key, found, "a value that transformers accepts", f"change {key}")


def _warned(config: Mapping[str, Any], texts: list[str]) -> Iterator[Problem]:
    """What transformers warns of in keys that are stated: other defaults are harmless."""
    mistakes = filter(_MISTAKE.search, dict.fromkeys(texts))
    problems = (_refused(config, text) for text in mistakes)
    yield from (problem for problem in problems if problem.key != "model_type")


def _of_kind(config: PretrainedConfig) -> Iterator[Problem]:
    """DMT trains causal text decoders only."""
    kinds = "vision|audio|vq|text_enc"
    if towers := [name for name in config.sub_configs if re.search(kinds, name)]:
        found = f"{config.model_type!r}, which has {', '.join(towers)} besides its text model"
        fix = "take the model_type and the keys of its text_config"
        yield Problem("model_type", found, "a model of text alone", fix)
    if getattr(config, "is_decoder", True) is False and config.model_type not in FAMILIES:
        allowed = "true: else each token sees the ones that it is to predict"
        found, fix = "false, which is its default", "add is_decoder: true"
        yield Problem("is_decoder", found, allowed, fix)


def _joint_problems(config: Mapping[str, Any], model_type: str) -> Iterator[Problem]:
    """Settings that do not go together, which transformers computes otherwise than stated, or
    refuses with a text that names no key."""
    cls = CONFIG_MAPPING[model_type]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope if isinstance(rope, Mapping) else {}
    yield from _head_problems(config, cls)
    inner = rope.get("rope_theta")
    theta = config.get("rope_theta", inner)
    if isinstance(theta, int | float) and theta <= 0:
        key = next(name for name in ("rope_theta", *_ROPE) if name in config)
        yield Problem(key, f"a rope_theta of {shown(theta)}", "a rope_theta above 0")
    if inner is not None and config.get("rope_theta", inner) != inner:
        found = f"{shown(config['rope_theta'])}, but {shown(inner)} in the map of positions"
        yield Problem("rope_theta", found, "one value", "remove one of them")
    share, kind = "partial_rotary_factor", rope.get("rope_type", rope.get("type"))
    if share in rope and kind != "proportional" and share not in _source(cls):
        key = next(name for name in _ROPE if name in config)
        yield Problem(key, share, f"no {share}: {model_type} turns whole heads", "remove it")
    window = config.get("sliding_window", getattr(cls, "sliding_window", None))
    if config.get("use_sliding_window") is True and window is None:
        yield Problem("sliding_window", "null", "a size, because use_sliding_window is true")
    layers = config.get("num_hidden_layers", getattr(cls, "num_hidden_layers", None))
    dense = config.get("mlp_only_layers")
    for layer in dense if isinstance(dense, list) and _whole(layers) else ():
        if isinstance(layer, int) and layer >= layers:
            yield Problem("mlp_only_layers", f"layer {shown(layer)}", f"0 to {layers - 1}")


def _head_problems(config: Mapping[str, Any], cls: type[PretrainedConfig]) -> Iterator[Problem]:
    """Heads that do not divide the hidden size, where no key states their size, and groups that
    do not divide them."""
    aliases: Mapping[str, str] = cls.attribute_map
    names = [aliases.get(name, name) for name in _HEADS]
    values: list[Any] = [
        next((config[key] for key in spellings if key in config), getattr(cls, own, None))
        for spellings, own in zip(zip(names, _HEADS, strict=True), names, strict=True)
    ]
    hidden, heads, groups = values
    sizes = ("head_dim", "qk_rope_head_dim")
    sized = any(config.get(size) or getattr(cls, size, None) for size in sizes)
    if cls.model_type in FAMILIES and not sized and _whole(hidden, heads) and hidden % heads:
        allowed, fix = f"a divisor of {names[0]} ({hidden})", f"change {names[1]} or {names[0]}"
        yield Problem(names[1], shown(heads), allowed, fix)
    elif names[2] in config and _whole(heads, groups) and heads % groups:
        allowed, fix = f"a divisor of {names[1]} ({heads})", f"change {names[2]}"
        yield Problem(names[2], shown(groups), allowed, fix)


def _whole(*sizes: object) -> bool:
    return all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What transformers warns of in a config while the context is open."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: (  # type: ignore[method-assign]
        warned.append(record.getMessage()) if record.name in _RULES else None
    )
    logger = logging.getLogger("transformers")
    level, others = logger.level, logger.handlers
    logger.setLevel(logging.WARNING)
    logger.handlers = [handler]
    try:
        yield warned
    finally:
        logger.handlers = others
        logger.setLevel(level)


def shown(value: object) -> str:
    """A value for an error text: on one line, short, never an exception."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, Mapping | list | tuple | set):
        kind = "map" if isinstance(value, Mapping) else "list"
        return f"a {kind} of {len(value)}"
    text = repr(value[:80]) if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
