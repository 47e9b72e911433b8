"""The Megatron model computes what transformers computes, in every layout."""

from pathlib import Path
from typing import Any

import pytest

from tests.models.configs import CONFIGS, ROPES, SMALL, config_of, scaled
from tests.models.in_megatron import check, run_cases, save_random_model
from toolkit.models.families import model_spec

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "ep2": {"dp": 2, "ep": 2},
}
YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7,
    "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 1,
}  # fmt: skip
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama {rope_type}": ("llama", scaled(rope_type)) for rope_type in ROPES},
    "llama yarn with mscale": (
        "llama",
        scaled("yarn", mscale=0.7, mscale_all_dim=0.5, truncate=False,
               original_max_position_embeddings=4096),
    ),
    "gpt_neox yarn": ("gpt_neox", {"rotary_pct": 0.5} | scaled("yarn", attention_factor=0.8)),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "qwen2 upper layers slide": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
    ),
    "gpt2 without attention scale": ("gpt2", {"scale_attn_weights": False}),
    "gpt_neox in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox odd share": ("gpt_neox", {"rotary_pct": 0.45, "rotary_emb_base": 500}),
    "smollm3 window": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 5},
    ),
    "phi3 longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.5, "original_max_position_embeddings": 12,
            "tie_word_embeddings": True, "sliding_window": 9,
            "rope_scaling": {
                "type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0],
            },
        },
    ),
    "glm4 yarn": ("glm4", {"partial_rotary_factor": 0.25} | scaled("yarn")),
    "olmo3 yarn": (
        "olmo3", {"rope_scaling": {"rope_type": "yarn", **ROPES["yarn"]}, "rope_theta": 500}
    ),
    "gpt_oss yarn": (
        "gpt_oss",
        {"rope_parameters": None, "layer_types": ["full_attention", "sliding_attention"] * 2,
         "num_key_value_heads": 2},
    ),
    "mixtral window": ("mixtral", {"sliding_window": 5}),
    "qwen3 mixed layers": (
        "qwen3",
        {
            "use_sliding_window": True, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "deepseek_v3 yarn": ("deepseek_v3", {"rope_scaling": YARN}),
    "deepseek_v3 dynamic": ("deepseek_v3", scaled("dynamic")),
    "deepseek_v3 yarn without mscale": ("deepseek_v3", scaled("yarn", truncate=False)),
    "qwen2_moe lower layers slide": (
        "qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}
    ),
    "qwen3_moe window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "qwen3_moe normalised": ("qwen3_moe", {"norm_topk_prob": True}),
}  # fmt: skip
"""Configs whose keys change the function, beside the plain ones."""


def cases_of(tmp_path: Path, layout: str) -> list[dict[str, Any]]:
    """Every family and variant that the layout concerns."""
    configs = {case: config_of(case) for case in CONFIGS if LAYOUTS[layout]}
    for name, (base, changes) in MORE.items():
        # Of these functions, layouts cut only what differs between layers.
        if layout == ("pp2" if any("layer" in key for key in changes) else "one process"):
            configs[name] = config_of(base, **changes)
    cases = []
    for name, config in configs.items():
        if layout == "ep2" and not model_spec(config).moe_layers:
            continue
        folder = tmp_path / name
        save_random_model(config, folder)
        cases.append({"name": name, "folder": str(folder), "layout": LAYOUTS[layout]})
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_losses_are_those_of_transformers(layout: str, tmp_path: Path) -> None:
    cases = cases_of(tmp_path, layout)
    check(run_cases(cases, world=2 if LAYOUTS[layout] else 1), cases)


assert SMALL["vocab_size"] % 2, "the vocabulary must need padding"
