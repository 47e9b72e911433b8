"""Shrinks a model so that it trains in seconds, without making it easier to split.

Errors of a layout depend on how it divides the model: heads, key/value groups, layers, experts
and vocabulary by the degrees of parallelism. So those numbers shrink, but even splits stay
even, and uneven splits stay uneven. Everything that is not a size (tied embeddings, biases,
query/key norms, rotary settings) does not change.
"""

from collections.abc import Mapping
from math import lcm
from typing import Any

from toolkit.layout import Layout
from toolkit.models.adapters.lora import trained_tensors
from toolkit.models.families import model_spec
from toolkit.models.families.arguments import rope_of
from toolkit.models.frozen import matching, names_of
from toolkit.models.model import Config, is_dropout, read
from toolkit.models.parameter_groups import in_small_model
from toolkit.plan.dimensions import smallest_factor
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import (
    CheckpointSection,
    EvaluationSection,
    LoggingSection,
    Recipe,
    ScheduleSection,
)

SMALL_PARAMETERS = 2_000_000
"""A model of at most this many parameters trains in seconds without shrinking."""
MICRO_BATCH = 2
VOCABULARY = 128
SEQUENCE_LENGTH = 32

PLAIN = Layout()
_LAYERS = 4
"""Two pipeline stages of two chunks each."""
_PAIR = 2
"""The other degrees that every rehearsal tries."""
_ACTIVE_EXPERTS = 2
_WIDEST_MLP = 4
"""Largest ratio of MLP to hidden size that is kept."""
_INNER_SIZES = (
    "intermediate_size", "intermediate_size_mlp", "n_inner", "moe_intermediate_size",
    "shared_expert_intermediate_size",
)  # fmt: skip
_WINDOWS = ("sliding_window", "attention_chunk_size", "floor_scale")


def shrink_recipe(recipe: Recipe, plan: Plan, steps: int, batch: int) -> Recipe:
    """The recipe as it is rehearsed: small, fp32, without dropout, nothing saved or logged.

    `batch` is the number of sequences per step. The learning rate is the recipe's peak in every
    step, up to a limit: a rehearsal that only warms up would hardly change the weights. The
    objective is one that the reference also defines: engines do not depend on it, and the
    inputs of another package's objective are not in a rehearsal's batches.
    """
    from toolkit.rehearse.losses import rehearsed_objective  # imports torch

    assert recipe.model.config is not None, "looked up by `prepare`"
    long = recipe.training.sequence_length
    short = shrink_sequence(long, plan.layout)
    config = shrink_config(without_noise(recipe.model.config), plan.layout)
    config = shrink_window(config, long, short)
    freeze = shrink_freeze(recipe.model.freeze, config)
    trained = trained_tensors(config, freeze, recipe.adapter)
    groups = in_small_model(recipe.optimizer.groups, trained)
    highest = max([1.0, *(group.lr_mult for group in groups)])
    largest = recipe.optimizer.kind.largest_rate / highest
    adapter = recipe.adapter
    if adapter is not None:
        adapter = adapter.with_values({"dropout": 0.0})
    return recipe.with_values(
        {
            "adapter": adapter,
            "parallel.outer": None,
            "model.hub": None,
            "model.revision": None,
            "model.init": "random",
            "model.config": config,
            "model.freeze": freeze,
            "data.stages": (),
            "training.steps": steps,
            "training.tokens": None,
            "training.epochs": None,
            "training.sequence_length": short,
            "training.global_batch_size": batch,
            "training.batch_ramp": None,
            "training.micro_batch_size": MICRO_BATCH,
            "training.precision": "fp32",
            "training.objective": rehearsed_objective(recipe),
            "optimizer.learning_rate": min(recipe.optimizer.learning_rate, largest),
            "optimizer.groups": groups,
            "kernels.loss": "chunked" if plan.layout.loss == "liger" else plan.layout.loss,
            "kernels.attention": "auto",
            "schedule": ScheduleSection(name="constant"),
            "evaluation": EvaluationSection(),
            "checkpoint": CheckpointSection(export=False),
            "logging": LoggingSection(),
        }
    )


def alike(
    original: int, unit: int, full: int = 1, rehearsed: int = 1, *, least: int = 1
) -> int:
    """The smallest size from `least` on that divides as `original` does. Never larger.

    `full`: a degree of the recipe's layout, which is `rehearsed` here. The remainder by `unit`
    and by `rehearsed` is that of `original`. Where `full` does not divide `original`,
    `rehearsed` does not divide the result.
    """
    period = lcm(unit, rehearsed)
    start = max(least, period)
    small = start + (original - start) % period
    if original % full and small % rehearsed == 0 and rehearsed > 1:
        small += 1
    return min(small, original)


def shrink_config(config: Mapping[str, Any], layout: Layout = PLAIN) -> dict[str, Any]:
    """A small Hugging Face config of the same family, which `layout` divides in the same way.

    `config` is one for which `check_config` finds no problem. One with at most
    SMALL_PARAMETERS is returned as it is.
    """
    if model_spec(config).parameters.total <= SMALL_PARAMETERS:
        return dict(config)
    model = read(config)
    settings, tensor = model.config, _scaled(layout.tp)
    stages = layout.pp * layout.vpp, smallest_factor(layout.pp) * smallest_factor(layout.vpp)
    layers = alike(settings["num_hidden_layers"], _LAYERS, *stages)
    vocabulary = alike(settings["vocab_size"], _PAIR, *tensor, least=VOCABULARY)
    sizes = {
        **_attention(settings, tensor),
        **_latent(settings),
        **_experts(settings, _scaled(layout.ep)),
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        **_layer_lists(settings, layers),
        **_token_ids(config, settings, vocabulary),
    }
    sizes |= _mlp(settings, sizes["hidden_size"], tensor)
    # Under the user's spelling where there is one: two names for a setting are refused.
    own = {name: name if name in config else model.names.get(name, name) for name in sizes}
    small = {**config, **{own[name]: value for name, value in sizes.items()}}
    head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
    return _with_fewer_factors(small, sizes.get("head_dim", head_dim), _share(settings))


def _scaled(degree: int) -> tuple[int, int]:
    """A degree of the recipe's layout, and its replacement in the rehearsal."""
    return degree, smallest_factor(degree)


def without_noise(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with every dropout and jitter that it states at 0.

    Random streams differ between layouts, so the results could not be compared.
    """
    noisy = [name for name in config if is_dropout(name) or name == "router_jitter_noise"]
    return {**config, **{name: 0.0 for name in noisy if config[name]}}


def shrink_sequence(length: int, layout: Layout = PLAIN) -> int:
    """A short sequence that tensor and context parallel split as they split `length`."""
    unit = _PAIR * smallest_factor(layout.cp)  # a context rank computes two equal runs
    return alike(length, unit, *_scaled(layout.tp), least=SEQUENCE_LENGTH)


def shrink_window(config: dict[str, Any], long: int, short: int) -> dict[str, Any]:
    """The config with a sliding window that hides as much of `short` as it hid of `long`.

    A window that reaches over the whole sequence is left alone. Chunks and the steps of the
    attention's temperature are windows in this.
    """
    sizes = {name: read(config).config[name] for name in _WINDOWS}
    return config | {
        name: max(1, size * short // long)
        for name, size in sizes.items()
        if size and size < long
    }


def shrink_freeze(patterns: tuple[str, ...], config: Mapping[str, Any]) -> tuple[str, ...]:
    """The patterns of `model.freeze` that suit the small model: those that match any of its
    tensors, from the first as many as leave one that trains."""
    names = names_of(config) if patterns else frozenset()
    kept = tuple(pattern for pattern in patterns if matching([pattern], names))
    while kept and matching(kept, names) == names:
        kept = kept[:-1]
    return kept


def _attention(settings: Config, tensor: tuple[int, int]) -> dict[str, Any]:
    """Heads, groups and hidden size. The ratios between them are kept."""
    heads, stated_groups = settings["num_attention_heads"], settings["num_key_value_heads"]
    groups = heads if stated_groups is None else stated_groups
    small_groups = alike(groups, _PAIR, *tensor)
    if tensor[0] > groups:
        small_groups = 1  # more ranks than groups, in small too
    small_heads = heads // groups * small_groups
    hidden = settings["hidden_size"]
    head_dim = settings.head_dim
    small_dim = _head_dim(settings, head_dim)
    small_hidden = max(1, small_heads * small_dim * hidden // (heads * head_dim))
    if hidden % heads == 0:  # which some families need
        small_hidden = max(1, small_hidden // small_heads) * small_heads
    sizes = {"num_attention_heads": small_heads, "hidden_size": small_hidden}
    if stated_groups is not None:
        sizes["num_key_value_heads"] = small_groups
    if settings["head_dim"] is not None:
        sizes["head_dim"] = small_dim
    return sizes


def _head_dim(settings: Config, head_dim: int) -> int:
    """8, or 9 if it is odd. More if only a share of it is rotated."""
    share = _share(settings)
    turned = {size: int(size * share) for size in (8, 16, 32, 64, head_dim)}
    whole_pairs = next(size for size, n in turned.items() if n >= 2 and n % 2 == 0)
    return min(whole_pairs + head_dim % 2, head_dim)


def _share(settings: Config) -> float:
    """The share of a head that positions turn."""
    return float(rope_of(settings).get("partial_rotary_factor", 1.0))


def _with_fewer_factors(config: dict[str, Any], head_dim: int, share: float) -> dict[str, Any]:
    """The config with as many factors of longrope as the smaller heads have pairs."""
    for where in ("rope_scaling", "rope_parameters"):
        rope = config.get(where) or {}
        pairs = int(head_dim * share) // 2
        lists = {name: rope[name] for name in ("short_factor", "long_factor") if name in rope}
        fewer = {name: all_[:: len(all_) // pairs][:pairs] for name, all_ in lists.items()}
        if fewer:
            config = {**config, where: {**rope, **fewer}}
    return config


_LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 8, "qk_head_dim": 24,
}  # fmt: skip
"""Sizes of latent attention, as different from each other as published ones."""


def _latent(settings: Config) -> dict[str, Any]:
    if settings["qk_rope_head_dim"] is None:
        return {}
    return {name: size for name, size in _LATENT.items() if settings[name] is not None}


def _mlp(settings: Config, hidden: int, tensor: tuple[int, int]) -> dict[str, Any]:
    """Inner sizes, in their ratio to the hidden size where that is not extreme."""
    sizes = {}
    for name in _INNER_SIZES:
        if (inner := settings[name]) is not None:
            ratio = min(inner / settings["hidden_size"], _WIDEST_MLP)
            sizes[name] = alike(inner, _PAIR, *tensor, least=int(ratio * hidden))
    return sizes


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _experts(settings: Config, expert: tuple[int, int]) -> dict[str, Any]:
    """Twice as many experts as a token uses, or a few more."""
    name = next((name for name in _EXPERTS if settings[name] is not None), None)
    if name is None:
        return {}
    active = min(settings["num_experts_per_tok"], _ACTIVE_EXPERTS)
    experts = alike(settings[name], 2 * _ACTIVE_EXPERTS, *expert)
    sizes = {name: experts, "num_experts_per_tok": active}
    groups = settings["n_group"]
    if groups is not None and groups > 1:
        # Of two or more experts each; a token chooses among all of them as before, or not.
        sizes |= {"n_group": 2, "topk_group": 2 if settings["topk_group"] == groups else 1}
    return sizes


def _layer_lists(settings: Config, layers: int) -> dict[str, Any]:
    """What the config says of single layers, for the first and the last of them."""
    total = settings["num_hidden_layers"]
    first = layers // 2
    kept = [*range(first), *range(total - layers + first, total)]
    lists: dict[str, Any] = {}
    for name in ("layer_types", "no_rope_layers"):
        if settings[name] is not None:
            lists[name] = [settings[name][index] for index in kept]
    for name in ("mlp_only_layers", "moe_layers"):
        if settings[name] is not None:
            lists[name] = [i for i, index in enumerate(kept) if index in settings[name]]
    for name in ("first_k_dense_replace", "max_window_layers"):
        if settings[name] is not None:
            lists[name] = sum(index < settings[name] for index in kept)
    steps = "decoder_sparse_step", "interleave_moe_layer_step", "sliding_window_pattern"
    for name in steps:
        if settings[name] is not None:
            lists[name] = min(settings[name], layers)
    return lists


def _token_ids(config: Mapping[str, Any], settings: Config, vocabulary: int) -> dict[str, Any]:
    """Special tokens moved into the vocabulary. Only those that the config states."""
    ids: dict[str, Any] = {}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        padding = name == "pad_token_id"  # whose default has to be in the vocabulary too
        stated: Any = settings[name] if padding else config.get(name)
        if isinstance(stated, list):
            ids[name] = [min(token, vocabulary - 1) for token in stated]
        elif stated is not None:
            ids[name] = min(stated, vocabulary - 1)
    return ids
