"""Train the smallest sensible model of every causal language model type of transformers.

    python -m tests.models.every_type [--context] [TYPE …]

Three steps in ddp × 1, ZeRO-3 × 2 and fsdp × 2 against transformers and torch
alone. Without TYPE: all types, and docs/how-it-is-tested.md is written.
With `--context`, instead, in ddp with rows that are spread over two ranks, and types.json.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import processes
from tests.engines.cases import TOLERANCE, VOCABULARY, Case, reference, run, train
from tests.forked import call_ranks, run_ranks
from toolkit.engines.distributed import Ranks
from toolkit.models.judge import known_keys, model_types
from toolkit.models.model import check_config
from toolkit.models.types import FILE, TYPES
from toolkit.plan.rules import context

PAGE = Path(__file__).parents[2] / "docs/how-it-is-tested.md"
STEPS = 3
LAYOUTS = {
    "ddp × 1": (Case("ddp", 4, steps=STEPS), 1),
    "ZeRO-3 × 2": (Case("deepspeed", 2, 3, steps=STEPS), 2),
    "fsdp × 2": (Case("fsdp", 2, steps=STEPS), 2),
}

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "d_model": 64,
    "num_hidden_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 1,
    "num_attention_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128,
    "ffn_dim": 128, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "sliding_window": 8,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "embedding_size": 64, "rotary_dim": 8,
}  # fmt: skip
"""What a config class calls its sizes, and how large they are here."""
FOUR_LAYERS = {"num_hidden_layers": 4}
"""One with attention among those with a recurrent state."""
ONE_OF_EACH = {"layer_types": ["linear_attention", "full_attention"]}
_PART = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "hidden_size_global": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
"""The sizes of a config that is a part of another one."""
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"max_position_embeddings": 64, "encoder_hash_byte_group_vocab": 100} | {
        f"{part}_config": _PART for part in ("patcher", "encoder", "decoder", "global")
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": {
        "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2],
    }}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon": {"head_dim": None},
    "falcon_h1": {
        "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "fuyu": {
        "image_size": 32, "patch_size": 8, "text_config": {"model_type": "persimmon", **_PART},
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "glm4_moe_lite": {"head_dim": None, "num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": ONE_OF_EACH,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"head_dim": None},
    "kimi_linear": ONE_OF_EACH,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {
        "head_dim": 8, "num_layers": 1, "ffn_hidden_size": 128, "expert_ffn_hidden_size": 32,
        "moe_topk": 2, "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
    "olmo_hybrid": FOUR_LAYERS,
    "phimoe": {"router_jitter_noise": 0.0},  # else it draws experts at random
    "qwen3_5_moe_text": FOUR_LAYERS,
    "qwen3_5_text": FOUR_LAYERS,
    "qwen3_next": FOUR_LAYERS,
    "qwen4_exp_text": FOUR_LAYERS | {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": FOUR_LAYERS | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What single types need besides; None: the key is left out."""


def tiny(model_type: str) -> dict[str, Any]:
    """The smallest sensible config of a type."""
    aliases, known = CONFIG_MAPPING[model_type].attribute_map, known_keys(model_type)
    sizes = {n: size for n, size in SIZES.items() if n in known and n not in aliases}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        sizes.pop("head_dim", None)
    sizes |= {own: SIZES[name] for name, own in aliases.items() if name in SIZES}
    config = {"model_type": model_type, **sizes, **SPECIAL.get(model_type, {})}
    return {name: value for name, value in config.items() if value is not None}


def plain(config: dict[str, Any]) -> dict[str, list[float]]:
    """The plain run, in a process of its own."""
    return reference(Case("ddp", 8, steps=STEPS, family=config))


@dataclass(frozen=True)
class Row:
    """What became of one type."""

    model_type: str
    differences: Mapping[str, float]
    """Largest relative difference of losses and gradient norms, by layout."""
    why: str = ""

    @property
    def agrees(self) -> bool:
        return not self.why and max(self.differences.values()) <= TOLERANCE


Results = Iterator[tuple[str, Mapping[str, list[float]]]]


def in_layouts(config: dict[str, Any]) -> Results:
    """What a model computes in each of `LAYOUTS`."""
    for layout, (case, world) in LAYOUTS.items():
        case = replace(case, family=config)
        yield layout, run([case], world)[case.name]


def on_spread_rows(config: dict[str, Any]) -> Results:
    """What it computes on two ranks of a context group."""
    yield "context 2", call_ranks(spread, 2, config)[0]


def spread(ranks: Ranks, config: dict[str, Any]) -> dict[str, list[float]]:
    """One rank of `on_spread_rows`, of types that `dmt check` would refuse, too."""
    case = Case("ddp", 4, steps=STEPS, family=config, parallel={"context": 2})
    with patch.object(context, "SPLIT_IS_KEPT", (config["model_type"],)):
        return train(case, ranks)


def tried(model_type: str, compute: Callable[..., Results] = in_layouts) -> Row:
    """Train one type, by default in every layout."""
    config = tiny(model_type)
    if problems := check_config(config):
        first = problems[0]
        return Row(model_type, {}, f"{first.key}: {first.found}; allowed: {first.allowed}")
    found = {}
    try:
        expected = run_ranks(plain, 1, config)[0]
        for layout, result in compute(config):
            found[layout] = max(
                abs(got - want) / abs(want)
                for what in ("loss", "grad_norm")
                for got, want in zip(result[what], expected[what], strict=True)
            )
    except AssertionError as error:
        lines = str(error).strip().splitlines()
        reasons = [line for line in lines if re.match(r"\S*Error: ", line)] or lines
        return Row(model_type, found, reasons[-1][:200])
    return Row(model_type, found)


TOWER = "besides its text model"
"""In what `dmt check` says of a config with a tower for images or sound."""


def write_page(rows: list[Row]) -> None:
    """Replace the lists of docs/how-it-is-tested.md."""
    agree = sum(row.agrees for row in rows)
    towers = [f"`{row.model_type}`" for row in rows if TOWER in row.why]
    rest = [f"`{row.model_type}`" for row in rows if not row.agrees and TOWER not in row.why]
    listed = f"{agree} of {len(rows)} types agree: all but these.\n"
    refused = f"Refused, as they are more than a model of text: {', '.join(towers)}.\n"
    others = f"Not equal, or failed: {', '.join(rest)}.\n"
    prose = re.split(r"\n\d+ of \d+ types agree", PAGE.read_text("utf-8"))[0]
    page = f"{prose}\n{listed}\n{refused}\n{others}"
    PAGE.write_text(page, encoding="utf-8")


def write_types(rows: list[Row]) -> None:
    """Write which types agree into types.json."""
    known = {name: dict(of) for name, of in TYPES.items()}
    for row in rows:
        known.setdefault(row.model_type, {}).pop("context", None)
        if row.agrees:
            known[row.model_type] = {"context": True, **known[row.model_type]}
    lines = [f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known)]
    FILE.write_text("{\n" + ",\n".join(filter(lambda x: "{}" not in x, lines)) + "\n}\n")


def main(arguments: list[str]) -> int:
    processes.HANG_S = 120.0
    compute = on_spread_rows if "--context" in arguments else in_layouts
    types = [argument for argument in arguments if argument != "--context"]
    rows = []
    for model_type in types or sorted(model_types):
        row = tried(model_type, compute)
        rows.append(row)
        numbers = "  ".join(f"{name} {value:.1e}" for name, value in row.differences.items())
        verdict = "same" if row.agrees else "NOT"
        print(f"{verdict:<4} {model_type:<24} {numbers} {row.why}", flush=True)
    print(f"{sum(row.agrees for row in rows)} of {len(rows)} agree")
    if not types:
        (write_page if compute is in_layouts else write_types)(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
