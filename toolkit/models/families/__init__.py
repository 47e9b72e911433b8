"""Model families: a config and a shape in megatron-core's terms.

A family is a function. A dense one is a row of `dense.py`. Every other causal language model of
transformers trains on transformers' own model. A `config` here is a dict for which
`check_config` found no problem.
"""

import json
from collections.abc import Mapping
from functools import lru_cache

from toolkit.errors import PlanError
from toolkit.models.families.base import Family, MegatronModel
from toolkit.models.families.deepseek import deepseek_v3
from toolkit.models.families.dense import DENSE
from toolkit.models.families.mixtures import corrected_mixture, gpt_oss, mixtral, qwen
from toolkit.models.model import Attention, read, text_of
from toolkit.models.spec import ModelSpec
from toolkit.registry import load

FAMILIES: Mapping[str, Family] = {
    **DENSE,
    "deepseek_v3": deepseek_v3,
    "glm4_moe": corrected_mixture,
    "gpt_oss": gpt_oss,
    "mixtral": mixtral,
    "qwen2_moe": qwen,
    "qwen3_moe": qwen,
}
"""Every `model_type` that megatron-core supports."""

__all__ = [
    "FAMILIES", "MegatronModel", "attention", "mapped", "megatron_model", "model_spec",
    "unsupported",
]  # fmt: skip


def attention(config: Mapping[str, object]) -> Attention:
    """The fastest implementation that computes this model's attention exactly."""
    return read(config).attention


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """The model's shape. Missing keys take transformers' defaults for the `model_type`."""
    return read(config).spec


def unsupported(config: Mapping[str, object]) -> str | None:
    """Why megatron-core cannot compute this config exactly. None when it can."""
    if (model := _of_family(text_of(config))) is not None:
        return model.unsupported
    return (
        f"DMT has no map between {config['model_type']} and megatron-core's model; "
        "transformers' own trains on the engines of parallel.model hf"
    )


def megatron_model(config: Mapping[str, object]) -> MegatronModel:
    """The config in megatron-core's terms. Raises PlanError if it is `unsupported`."""
    if (reason := unsupported(config)) is not None:
        raise PlanError(f"parallel.model: {reason}", fix="set parallel.model to hf")
    return mapped(config)


def mapped(config: Mapping[str, object]) -> MegatronModel:
    """The map of the model's tensors. Its other fields are valid if nothing is
    `unsupported`. Imports torch for a type that megatron-core does not support."""
    if (model := _of_family(text_of(config))) is not None:
        return model
    tensors: MegatronModel = load("toolkit.models.counting:tensors")(text_of(config))
    return tensors


@lru_cache(maxsize=256)
def _of_family(text: str) -> MegatronModel | None:
    """The model of a config, as JSON, that has a family."""
    model = read(json.loads(text))
    family = FAMILIES.get(model.spec.family)
    return None if family is None else family(model.config, model.spec)
