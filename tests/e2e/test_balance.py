"""`model.balance` keeps experts in use where the data would leave most of them idle."""

import random
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.product import dmt, run, settings
from toolkit.run import jsonl

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}  # fmt: skip
GLM = SIZES | {
    "model_type": "glm4_moe", "num_hidden_layers": 3, "first_k_dense_replace": 1,
    "head_dim": 16, "moe_intermediate_size": 64, "n_routed_experts": 8, "n_shared_experts": 1,
}  # fmt: skip
RECIPE = """
name: balance
model: {config: {}}
data: {train: {kind: text, files: [skewed.txt]}, tokenizer: bytes}
training:
  steps: 80
  sequence_length: 128
  global_batch_size: 16
  micro_batch_size: 16
  precision: fp32
optimizer: {learning_rate: 1.0e-3}
schedule: {name: constant, warmup_steps: 10}
parallel: {engine: ddp}
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
checkpoint: {export: false}
logging: {every_steps: 1}
"""


def skewed(folder: Path) -> None:
    """Letters of 64, half of which follow from the one before, the others Zipf's."""
    draw = random.Random(0)
    weights = [1 / rank for rank in range(1, 65)]
    text, last = [], 0
    for chance in (draw.random() for _ in range(100_000)):
        last = (7 * last + 3) % 64 if chance < 0.5 else draw.choices(range(64), weights)[0]
        text.append(chr(48 + last))
    (folder / "skewed.txt").write_text("".join(text))


def test_the_busiest_expert_of_the_last_of_80_steps(tmp_path: Path) -> None:
    """Over the mean; with 2 of 8 experts per token it is 4 where all tokens choose the same,
    and above 3 here without balance."""
    skewed(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    balance = {"kind": "bias", "bias_update": 0.01}
    changes = settings({"model.config": GLM, "model.balance": balance})
    run(dmt("launch", "r.yaml", "--run-dir", "run", *changes), tmp_path, code=0)
    steps = jsonl.read(tmp_path / "run" / "metrics.jsonl")
    assert len(steps) == 80
    assert 1.0 <= mean(step["busiest_expert"] for step in steps[-20:]) <= 1.5
    assert all(step["dropped_tokens"] == 0 for step in steps)
