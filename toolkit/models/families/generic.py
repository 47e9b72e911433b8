"""A model type without a family file: what transformers itself says of it.

A family file is what megatron-core, conversion and planning without torch need. Every other
causal language model of transformers trains on transformers' own implementation: its config
class knows its keys, and its shape is counted on the model itself, without storage. Nothing
here imports transformers or torch before it is asked for such a model.
"""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.models.config_keys import ROPE, Key, Kind
from toolkit.models.families.base import (
    Attention,
    Family,
    MegatronModel,
    Settings,
)
from toolkit.models.spec import ModelSpec
from toolkit.registry import load

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ANY = Kind("what transformers accepts", lambda _: True)
_PUBLISHED = (
    "torch_dtype", "use_cache", "model_type", "_name_or_path", "rope_parameters", *ROPE
)  # fmt: skip
"""Keys of published configs that no config class lists."""
_STATE_SPACE = re.compile("mamba|ssm_")
"""Types and keys of models with state-space layers, alone or beside attention."""
SIZES: Mapping[str, tuple[str, ...]] = {
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "intermediate": (
        "intermediate_size_mlp",
        "intermediate_size",
        "ffn_dim",
        "decoder_ffn_dim",
        "n_inner",
        "d_ff",
    ),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "expert_intermediate": ("moe_intermediate_size", "intermediate_size"),
}
"""Names of a size in transformers' config classes, in order of preference."""


NOT_INITIALISED = ("apertus", "cpmant", "gemma3n_text", "openai-gpt", "reformer", "xlstm")
"""Types whose classes in transformers leave weights without initial values, or fail at it."""


@cache
def model_types() -> frozenset[str]:
    """Every `model_type` of which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@cache
def generic(model_type: str) -> Family:
    """The family of a type of `model_types`, in the words of its config class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    keys = {name: Key(_ANY) for name in (*_PUBLISHED, *_read_keys(config))}
    for field in fields(config):
        default = None if field.default is MISSING else field.default
        keys[field.name] = Key(_ANY, default)
    stacked = _stacks_experts(model_type)
    return Family(
        model_type,
        keys,
        _tensors,
        _unsupported,
        aliases={name: own for name, own in config.attribute_map.items() if own in keys},
        shape=_shape,
        attention=_attention,
        freezes_padding=False,
        stacked_experts=stacked,
    )


def _stacks_experts(model_type: str) -> bool:
    """Does transformers load this type's experts as it holds them, without a conversion?"""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    mapping = get_checkpoint_conversion_mapping(model_type) or []
    return not any("experts.*" in pattern for one in mapping for pattern in one.source_patterns)


def _read_keys(config: type) -> list[str]:
    """Keys that the model reads although its config class does not list them (`head_dim`)."""
    module = config.__module__.replace(".configuration_", ".modeling_")
    found = find_spec(module)
    if found is None or found.origin is None:
        return []
    source = Path(found.origin).read_text(encoding="utf-8")
    return re.findall(r"getattr\((?:self\.)?config, \"(\w+)\"", source)


def build_config(config: Mapping[str, Any]) -> "PretrainedConfig":
    """transformers' own config object; raises what its class raises."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**deepcopy(dict(config)))


def size_of(stated: Mapping[str, Any], *names: str) -> int | None:
    """The first of these sizes that the config states and that is not 0; the largest, if it
    states one per layer."""
    for name in names:
        value = stated.get(name)
        if isinstance(value, list | tuple):
            value = max((one for one in value if isinstance(one, int)), default=None)
        if value and isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def windows(stated: Mapping[str, Any], layers: int) -> tuple[bool, int | None, int]:
    """Whether it is chunked instead of a sliding window, its size, and its layers: all, if the
    config does not list them."""
    kinds = list(stated.get("layer_types") or ["sliding_attention"] * layers)
    if "chunked_attention" in kinds:
        return True, size_of(stated, "attention_chunk_size"), kinds.count("chunked_attention")
    window = size_of(stated, "sliding_window")
    if stated.get("use_sliding_window") is False:
        window = None
    return False, window, min(kinds.count("sliding_attention"), layers) if window else 0


def _count(settings: Settings) -> Any:
    """The `Count` of this model by transformers' own classes, remembered by its config as
    text."""
    text = json.dumps(settings.stated, sort_keys=True, default=str)
    return load("toolkit.models.counting:count")(text)


def _shape(settings: Settings) -> ModelSpec:
    spec: ModelSpec = _count(settings).spec
    return spec


def _tensors(spec: ModelSpec, settings: Settings) -> MegatronModel:
    del spec
    tensors: MegatronModel = _count(settings).tensors
    return tensors


def _attention(settings: Settings) -> Attention:
    """As fast as transformers has it for this model, and exact: soft-capping is in `eager`."""
    capped = settings["attn_logit_softcapping"] is not None
    return "sdpa" if _count(settings).supports_sdpa and not capped else "eager"


def _unsupported(spec: ModelSpec, settings: Settings) -> str:
    del spec
    model_type = settings.family.model_type
    hf = "transformers' own trains on the engines of parallel.model hf"
    if any(_STATE_SPACE.match(key) for key in (model_type, *settings.family.keys)):
        return (
            f"{model_type} has state-space layers, and megatron-core's run in mamba-ssm's GPU "
            f"kernels alone, with which DMT was not tested; {hf}"
        )
    return f"DMT has no map between {model_type} and megatron-core's model; {hf}"
