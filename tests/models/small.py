"""The smallest model of every family, filled."""

from typing import Any

import torch

from tests.models import configs
from toolkit.models import huggingface as hf
from toolkit.recipe.schema import ModelSection

SMALL = configs.SMALL | {"num_hidden_layers": 2, "pad_token_id": None}

FAMILIES: dict[str, dict[str, Any]] = {
    name: config | {"n_layer" if "n_layer" in config else "num_hidden_layers": 2}
    for name, config in configs.CONFIGS.items()
    if " " not in name
} | {
    "llama": SMALL | {"tie_word_embeddings": True},
    "llama4_text": SMALL
    | {"head_dim": 16, "num_local_experts": 4, "interleave_moe_layer_step": 2, "floor_scale": 2}
    | {"no_rope_layer_interval": 2, "intermediate_size_mlp": 96, "attention_chunk_size": 3},
}


def section(family: str, **extra: Any) -> ModelSection:
    return ModelSection(config={"model_type": family, **FAMILIES[family], **extra})


def filled(model: ModelSection, seed: int = 1) -> Any:
    config = hf.build_config(model)
    built = hf.empty_model(config, torch.device("cpu"))
    hf.fill(built, hf.weight_source(model, config, seed))
    return built
