"""Weights go from a Hugging Face folder straight into any layout, each byte read once."""

from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from tests.forked import run_ranks
from tests.models.loading_worker import rectangles_read

SHAPE = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 101,
}  # fmt: skip
MODELS = {
    "tied-llama": {"model_type": "llama", "tie_word_embeddings": True, **SHAPE},
    "llama": {"model_type": "llama", **SHAPE},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101,
        "n_positions": 32,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_replica_reads_every_element_once(name: str, tmp_path: Path) -> None:
    """Norms and the tied embedding, which several ranks hold, are handed on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: dict[str, Any] = MODELS[name]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path)
    reads = chain.from_iterable(run_ranks(rectangles_read, 4, tmp_path))
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        times = {key: np.zeros(file.get_slice(key).get_shape(), int) for key in file.keys()}  # noqa: SIM118
    for tensor, rows, columns in reads:
        rectangle = (slice(*rows),) if columns is None else (slice(*rows), slice(*columns))
        times[tensor][rectangle] += 1
    for tensor, count in times.items():
        assert (count == 1).all(), tensor
