"""Olmo3: olmo2 in which three of four layers slide, and may turn by positions differently."""

from collections.abc import Mapping
from dataclasses import replace

from toolkit.models.config_keys import LAYER_TYPES, SIZE, Key
from toolkit.models.families import common, llama, olmo2
from toolkit.models.families.base import Family, MegatronModel, Settings
from toolkit.models.families.shape import counted
from toolkit.models.spec import ModelSpec

KEYS: Mapping[str, Key] = {
    **olmo2.KEYS,
    "sliding_window": Key(SIZE, 4096),
    "layer_types": Key(LAYER_TYPES, nullable=True),
}


def sliding(settings: Settings) -> list[int]:
    """Every layer but each fourth."""
    return [layer for layer in range(settings["num_hidden_layers"]) if (layer + 1) % 4]


def model(spec: ModelSpec, settings: Settings) -> MegatronModel:
    """Olmo3 as a megatron-core GPTModel."""
    plain = olmo2.model(spec, settings)
    return replace(plain, gpt={**plain.gpt, **common.layered_rotary(settings)})


OLMO3 = Family(
    "olmo3",
    KEYS,
    model,
    llama.unsupported,
    shape=counted,
    query_key_norm=True,
    sliding=sliding,
    rope_types=("default", "linear", "yarn", "llama3"),
    rope_bases={"full_attention": 500_000.0, "sliding_attention": 500_000.0},
)
