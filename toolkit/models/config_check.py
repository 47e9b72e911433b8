"""Checks that transformers can build a Hugging Face config dict, and reports every mistake.

Nothing here raises: for any values, the result is a list of problems, and an empty list means
that `families.model_spec` may be called.
"""

from collections.abc import Callable, Iterable, Mapping
from re import fullmatch, search
from typing import TYPE_CHECKING, Any

from toolkit.errors import Problem
from toolkit.models.config_keys import (
    FOREIGN_NAMES,
    LARGEST,
    NUMBERS,
    POSITIVE,
    ROPE_COMMON,
    ROPE_NEEDS,
    ROPE_READS,
    ROPE_VALUES,
    UNIT_FLOAT,
)
from toolkit.models.families import FAMILIES, settings_of
from toolkit.models.families.base import Family, Settings
from toolkit.models.families.common import rope_type_of
from toolkit.models.families.generic import build_config, model_types
from toolkit.text.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OR_GENERIC = (
    ", or another causal language model of transformers, which trains with parallel.model hf"
)
_LOOKED_UP = 100
"""Maximum number of unknown keys that are compared with the known ones; more would take
seconds."""


def check_config(config: Mapping[str, object]) -> list[Problem]:
    """Return every mistake in `config`; an empty list when transformers can build it.

    Keys are the config's own, dotted inside a map (`rope_scaling.factor`).
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        return _check_generic(config)
    settings = settings_of(config)
    problems = _check_keys(settings)
    wrong = {settings.family.name_of(problem.key) for problem in problems}
    for names, check in _JOINT_CHECKS:
        # A joint rule over an invalid value would only add noise.
        if not wrong & set(map(settings.family.name_of, names)):
            problems.extend(check(settings))
    return problems


def _check_generic(config: Mapping[str, object]) -> list[Problem]:
    """Problems of transformers' own config class, for a model without a family file."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in model_types():
        found = shown(model_type) if "model_type" in config else "nothing"
        known = ", ".join(sorted(FAMILIES)) + _OR_GENERIC
        names = sorted(model_types()) if isinstance(model_type, str) else []
        return [Problem("model_type", found, known, did_you_mean(model_type, names))]
    settings = settings_of(config)
    if problems := _check_keys(settings):
        return problems
    try:
        built = build_config(config)
    except Exception as error:  # noqa: BLE001 - a strict config class raises what it likes
        return [_refused(settings, error)]
    return [*_check_kind(built)]


def _refused(settings: Settings, error: Exception) -> Problem:
    """The error of a transformers config class, under the key that it names."""
    text = " ".join(str(error).split())
    named = search(r"[Ff]ield '(\w+)'|`(\w+)`", text)
    key = next((name for name in named.groups() if name), "") if named else ""
    if key not in settings.stated:
        key = "model_type"
    return Problem(key, shown(settings.stated[key]), f"what transformers accepts: {text[:300]}")


def _check_kind(config: "PretrainedConfig") -> Iterable[Problem]:
    """DMT trains causal text decoders only."""
    towers = [name for name in config.sub_configs if search("vision|audio|vq|text_enc", name)]
    if towers:
        found = f"{config.model_type!r}, which has {', '.join(towers)} besides its text model"
        allowed = "a model of text alone"
        fix = "take the model_type and the keys of its text_config"
        yield Problem("model_type", found, allowed, fix)
    if getattr(config, "is_decoder", True) is False:
        allowed = "true: else each token sees the ones that it is to predict"
        yield Problem(
            "is_decoder", "false, which is its default", allowed, "add is_decoder: true"
        )


def _check_keys(settings: Settings) -> list[Problem]:
    """Unknown keys, wrong types, values out of range, and one setting under two names."""
    problems: list[Problem] = []
    family = settings.family
    largest = {family.name_of(name): most for name, most in LARGEST.items()}
    for name, value in settings.stated.items():
        own = family.aliases.get(name, name)
        key = family.keys.get(own)
        if key is None:
            problems.append(_unknown_key(name, family, look_up=len(problems) < _LOOKED_UP))
        elif own != name and own in settings.stated:
            both = f"both {name} and {own}"
            problems.append(Problem(name, both, "one name for one setting", f"remove {name}"))
        elif not (value is None and key.nullable) and not key.kind.accepts(value):
            allowed = key.kind.allowed + (", or null" if key.nullable else "")
            problems.append(Problem(name, shown(value), allowed, _retyped(value)))
        elif own in largest and isinstance(value, int) and value > largest[own]:
            allowed = f"whole number from 1 to {largest[own]:,}, far above any published model"
            problems.append(Problem(name, shown(value), allowed))
    return problems


def _unknown_key(name: object, family: Family, *, look_up: bool) -> Problem:
    foreign = family.name_of(FOREIGN_NAMES.get(name, name)) if isinstance(name, str) else ""
    fix = f"did you mean `{foreign}`?" if foreign in family.keys else ""
    return Problem(
        _key_text(name),
        "an unknown key",
        f"the keys of transformers' {family.model_type} config",
        fix or (did_you_mean(name, [*family.keys, *family.aliases]) if look_up else ""),
    )


def _check_latent(settings: Settings) -> Iterable[Problem]:
    """Rules of latent attention: a key and value for each head, and transformers' limits."""
    heads, turned = settings["num_attention_heads"], settings["qk_rope_head_dim"]
    if turned is None:
        return
    if settings["num_key_value_heads"] not in (None, heads):
        allowed = f"num_attention_heads ({heads}): latent attention has no groups"
        found = shown(settings["num_key_value_heads"])
        yield Problem("num_key_value_heads", found, allowed, f"use {heads}")
    if turned % 2:
        allowed = "an even size, because rotary positions turn pairs"
        yield Problem("qk_rope_head_dim", shown(turned), allowed)
    size = turned + settings["qk_nope_head_dim"]
    for name, computed in (("head_dim", turned), ("qk_head_dim", size)):
        if settings[name] not in (None, computed):
            allowed = f"{computed}, which transformers computes of the other sizes"
            yield Problem(name, shown(settings[name]), allowed, "remove it")


def _check_heads(settings: Settings) -> Iterable[Problem]:
    if settings["qk_rope_head_dim"] is not None:
        return  # its head sizes are its own
    heads, hidden = settings["num_attention_heads"], settings["hidden_size"]
    head_dim = settings["head_dim"]
    heads_key = settings.spelling("num_attention_heads")
    if (head_dim is None or settings.family.strict_heads) and hidden % heads:
        allowed = f"a divisor of {settings.spelling('hidden_size')} ({hidden})"
        yield Problem(heads_key, shown(heads), allowed, _divisor_near(hidden, heads))
        return
    size = head_dim or hidden // heads
    if settings.family.rotary and size % 2:
        allowed = "an even head size, because rotary positions turn pairs"
        found = f"a head size of {size}"
        yield Problem("head_dim" if head_dim else heads_key, found, allowed)


def _check_kv_heads(settings: Settings) -> Iterable[Problem]:
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    if kv_heads is not None and heads % kv_heads:
        allowed = f"a divisor of {settings.spelling('num_attention_heads')} ({heads})"
        fix = _divisor_near(heads, kv_heads)
        yield Problem("num_key_value_heads", shown(kv_heads), allowed, fix)


def _check_rotary_share(settings: Settings) -> Iterable[Problem]:
    """A family may rotate only a share of each head; it must be a whole number of pairs."""
    rope = settings["rope_parameters"] or settings["rope_scaling"] or {}
    inner = rope.get("partial_rotary_factor")
    if inner is not None and not ROPE_VALUES["partial_rotary_factor"].accepts(inner):
        return  # _check_rope says so
    name = settings.family.rotary_share
    if not name:
        if inner is not None and rope.get("rope_type") != "proportional":
            key = "rope_parameters.partial_rotary_factor"
            owners = sorted(name for name, one in FAMILIES.items() if one.rotary_share)
            allowed = f"a key of {', '.join(owners)} alone, but for rope_type proportional"
            yield Problem(key, shown(inner), allowed, "remove it")
        return
    stated = settings.stated.get(name)
    if stated is not None and inner not in (None, stated):
        found = f"{shown(stated)}, but partial_rotary_factor: {shown(inner)}"
        yield Problem(name, found, "one value", "remove one of them")
        return
    head_dim = settings.head_dim
    share = settings[name] if inner is None else inner
    turned = int(head_dim * share)
    if turned < 2 or turned % 2:
        found = f"{shown(share)}, which turns {turned} of {head_dim} dimensions"
        yield Problem(name, found, "a share that is 2 or more and even")


def _check_layer_types(settings: Settings) -> Iterable[Problem]:
    layers = settings["num_hidden_layers"]
    for name in ("no_rope_layers", "layer_types"):
        if settings[name] is not None and len(settings[name]) != layers:
            allowed = f"one entry per layer (num_hidden_layers: {layers})"
            yield Problem(name, f"{len(settings[name])} entries", allowed)
    types = settings["layer_types"] or ()
    if "sliding_attention" in types and settings["use_sliding_window"] is False:
        allowed = "true, for sliding_attention layers"
        yield Problem("use_sliding_window", "false", allowed)


def _check_sliding_window(settings: Settings) -> Iterable[Problem]:
    if settings["use_sliding_window"] and settings["sliding_window"] is None:
        yield Problem("sliding_window", "null", "a size, because use_sliding_window is true")


def _check_experts(settings: Settings) -> Iterable[Problem]:
    experts, active = settings["num_experts"], settings["num_experts_per_tok"]
    if experts is not None and active > experts:
        allowed = f"at most {settings.spelling('num_experts')} ({experts})"
        yield Problem("num_experts_per_tok", shown(active), allowed)


def _check_groups(settings: Settings) -> Iterable[Problem]:
    """Rules of experts: a group is ranked by its best two, and a token chooses from the best
    groups."""
    experts, groups, best = (
        settings[name] for name in ("num_experts", "n_group", "topk_group")
    )
    if groups is None or best is None:
        return
    if experts % groups or experts // groups < 2:
        key = settings.spelling("num_experts")
        allowed = f"a divisor of {key} ({experts}) that leaves 2 or more in a group"
        yield Problem("n_group", shown(groups), allowed)
    elif best > groups:
        yield Problem("topk_group", shown(best), f"at most n_group ({groups})")
    elif settings["num_experts_per_tok"] > best * experts // groups:
        allowed = f"at most the {best * experts // groups} experts of topk_group groups"
        found = shown(settings["num_experts_per_tok"])
        yield Problem("num_experts_per_tok", found, allowed)


def _check_listed_layers(settings: Settings) -> Iterable[Problem]:
    layers = settings["num_hidden_layers"]
    for name in ("mlp_only_layers", "moe_layers"):
        for index in settings[name] or ():
            if index >= layers:
                yield Problem(name, f"layer {shown(index)}", f"layers 0 to {layers - 1}")


def _check_tokens(settings: Settings) -> Iterable[Problem]:
    """Only stated ids, and the row of the padding token, which is not trained: other defaults
    beyond a small vocabulary are harmless in training."""
    vocab, padding = settings["vocab_size"], settings["pad_token_id"]
    if "pad_token_id" not in settings.stated and (padding or 0) >= vocab:
        fix = "state pad_token_id (null: none)"
        yield Problem(
            "pad_token_id", f"{padding}, the default", f"below vocab_size ({vocab})", fix
        )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = settings.stated.get(name)
        for token in ids if isinstance(ids, list) else [ids]:
            if token is not None and token >= vocab:
                yield Problem(name, shown(token), f"below vocab_size ({vocab})")


def _check_positions(settings: Settings) -> Iterable[Problem]:
    stated, used = settings.stated.get("n_ctx"), settings["max_position_embeddings"]
    if stated is not None and stated != used:
        allowed = f"n_positions ({used}), which is what transformers reads"
        yield Problem("n_ctx", shown(stated), allowed, "set n_positions, remove n_ctx")


def _check_rope(settings: Settings) -> Iterable[Problem]:
    """The map of rotary settings, under its old or its new name."""
    scaling, parameters = settings["rope_scaling"], settings["rope_parameters"]
    if scaling and parameters:
        found = "both rope_scaling and rope_parameters"
        yield Problem("rope_scaling", found, "one of them", "keep rope_parameters")
        return
    if parameters and settings.family.rope_bases:
        yield from _check_rope_layers(settings, parameters)
    for where, rope in _rope_maps(settings):
        theta, inner = settings["rope_theta"], rope.get("rope_theta")
        # Of layers with a window, transformers reads the base elsewhere.
        windowed = where.endswith(".sliding_attention")
        if not windowed and None not in (theta, inner) and theta != inner:
            found = f"{shown(inner)}, but rope_theta: {shown(theta)}"
            yield Problem(f"{where}.rope_theta", found, "one value", "remove one of them")
        yield from _check_rope_values(where, rope)
        yield from _check_rope_type(settings, where, rope)


def _rope_maps(settings: Settings) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Every map of rotary settings with its key: one, or one for each type of layer."""
    where = "rope_scaling" if settings["rope_scaling"] else "rope_parameters"
    if where == "rope_scaling" or not settings.family.rope_bases:
        yield where, settings[where] or {}
        return
    for layer_type in settings.family.rope_bases:
        if isinstance(rope := (settings[where] or {}).get(layer_type, {}), Mapping):
            yield f"{where}.{layer_type}", rope


def _check_rope_layers(
    settings: Settings, parameters: Mapping[str, object]
) -> Iterable[Problem]:
    """`rope_parameters` of a family that has a map for each type of layer."""
    known = settings.family.rope_bases
    for index, (name, value) in enumerate(parameters.items()):
        where = f"rope_parameters.{_key_text(name)}"
        if name not in known:
            fix = did_you_mean(name, known) if index < _LOOKED_UP else ""
            yield Problem(where, "an unknown key", " and ".join(known), fix)
        elif not isinstance(value, Mapping):
            yield Problem(where, shown(value), "map")
        elif "partial_rotary_factor" in value:
            key = f"{where}.partial_rotary_factor"
            yield Problem(key, "a share of each head", "whole heads", "remove it")


def _check_rope_values(where: str, rope: Mapping[str, object]) -> Iterable[Problem]:
    for index, (name, value) in enumerate(rope.items()):
        kind = ROPE_VALUES.get(name)
        if kind is None:
            allowed = ", ".join(ROPE_VALUES)
            fix = did_you_mean(name, ROPE_VALUES) if index < _LOOKED_UP else ""
            yield Problem(f"{where}.{_key_text(name)}", "an unknown key", allowed, fix)
        elif not kind.accepts(value):
            yield Problem(f"{where}.{name}", shown(value), kind.allowed)


def _check_rope_type(
    settings: Settings, where: str, rope: Mapping[str, object]
) -> Iterable[Problem]:
    rope_type = rope_type_of(rope)
    known = settings.family.rope_types
    if not isinstance(rope_type, str) or rope_type not in known:
        fix, allowed = did_you_mean(rope_type, known), ", ".join(known)
        yield Problem(f"{where}.rope_type", shown(rope_type), allowed, fix)
        return
    needed = ROPE_NEEDS[rope_type]
    if missing := [name for name in needed if name not in rope and settings[name] is None]:
        found = f"rope_type {rope_type} without {', '.join(missing)}"
        yield Problem(where, found, f"all of {', '.join(needed)}")
    read = {*ROPE_COMMON, *needed, *ROPE_READS.get(rope_type, ())}
    for name in [name for name in rope if name in ROPE_VALUES and name not in read]:
        allowed = f"a key that rope_type {rope_type} reads: {', '.join(sorted(read))}"
        fix = "remove it, or name the rope_type that reads it"
        yield Problem(f"{where}.{name}", shown(rope[name]), allowed, fix)


def _check_rope_factors(settings: Settings) -> Iterable[Problem]:
    """longrope has a factor for every rotated pair; llama3's low factor is below its high
    one."""
    for where, rope in _rope_maps(settings):
        low, high = (rope.get(name, 0) for name in ("low_freq_factor", "high_freq_factor"))
        if POSITIVE.accepts(low) and POSITIVE.accepts(high) and low > high:
            allowed = f"no less than low_freq_factor ({shown(low)})"
            yield Problem(f"{where}.high_freq_factor", shown(high), allowed)
        share = rope.get("partial_rotary_factor", settings[settings.family.rotary_share] or 1.0)
        for name in ("short_factor", "long_factor"):
            factors = rope.get(name, ())
            if not NUMBERS.accepts(factors) or not UNIT_FLOAT.accepts(share):
                continue  # _check_rope says so
            pairs = int(settings.head_dim * share) // 2
            if len(factors) != pairs:
                allowed = f"{pairs}, one for every pair that turns"
                yield Problem(f"{where}.{name}", f"{len(factors)} factors", allowed)


_ROTARY = (
    "hidden_size", "num_attention_heads", "head_dim", "rope_scaling", "rope_parameters"
)  # fmt: skip
_JOINT_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Settings], Iterable[Problem]]], ...] = (
    (("hidden_size", "num_attention_heads", "head_dim"), _check_heads),
    (("num_attention_heads", "num_key_value_heads"), _check_kv_heads),
    (
        ("num_attention_heads", "num_key_value_heads", "qk_rope_head_dim", "qk_nope_head_dim"),
        _check_latent,
    ),
    ((*_ROTARY, "rotary_pct", "partial_rotary_factor"), _check_rotary_share),
    (
        ("num_hidden_layers", "layer_types", "use_sliding_window", "no_rope_layers"),
        _check_layer_types,
    ),
    (("sliding_window", "use_sliding_window"), _check_sliding_window),
    (("num_experts", "num_experts_per_tok"), _check_experts),
    (("num_experts", "num_experts_per_tok", "n_group", "topk_group"), _check_groups),
    (("num_hidden_layers", "mlp_only_layers", "moe_layers"), _check_listed_layers),
    (("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id"), _check_tokens),
    (("max_position_embeddings", "n_ctx"), _check_positions),
    (("rope_scaling", "rope_parameters", "rope_theta"), _check_rope),
    (_ROTARY, _check_rope_factors),
)
"""Rules over several settings, each with the keys that it reads."""


def _divisor_near(number: int, wanted: int) -> str:
    """The fix that names the divisor of `number` nearest to `wanted`, if one is near."""
    for step in range(min(wanted, 4096)):
        for candidate in (wanted - step, wanted + step):
            if number % candidate == 0:
                return f"use {candidate}"
    return ""


def _key_text(name: object) -> str:
    return name if isinstance(name, str) and len(name) <= 80 else shown(name)


def _retyped(value: object) -> str:
    """The correct spelling of a quoted number, or of an integer for a decimal number."""
    if isinstance(value, str) and fullmatch(r"-?[0-9.]{1,20}([eE]-?[0-9]{1,3})?", value):
        return f"write {value} without quotes"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"write {int(value)} if a whole number is meant"
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**6:
        return f"write {value}.0 if a decimal number is meant"
    return ""


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
