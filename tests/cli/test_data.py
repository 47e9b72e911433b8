"""`dmt data`, on real files."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from toolkit.cli.data import app
from toolkit.errors import DataError

RECIPE = """
name: small
model:
  config: {model_type: llama, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
           num_attention_heads: 2, num_key_value_heads: 2, vocab_size: 300,
           max_position_embeddings: 64}
data:
  train: {kind: text, files: ["*.txt"]}
  validation_fraction: 0.25
training: {steps: 2, sequence_length: 8, global_batch_size: 2, precision: fp32}
optimizer: {learning_rate: 1.0e-3}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DMT_CACHE", str(tmp_path / "cache"))
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text("the cat sat on the mat " * 5)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path / "recipe.yaml"


def dmt_data(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_prepare(recipe: Path) -> None:
    said = json.loads(dmt_data("prepare", recipe, "--json"))
    assert said["train"] == {
        "documents": 6,
        "tokens": 6 * 116,
        "samples": 86,
        "tokens_per_epoch": 86 * 8,
    }
    assert said["validation"]["documents"] == 2
    assert said["vocab_size"] == 257
    assert 2 < said["unigram_entropy_nats"] < 3
    text = dmt_data("prepare", recipe)
    assert "train: 6 documents, 696 tokens, 86 samples of 8" in text


def test_prepare_follows_overrides(recipe: Path) -> None:
    said = json.loads(
        dmt_data("prepare", recipe, "--json", "--set", "data.validation_fraction=0")
    )
    assert said["validation"] is None
    assert said["train"]["documents"] == 8


def test_tokenizer_then_a_recipe_that_uses_it(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "bpe"
    text = dmt_data("tokenizer", recipe, "--vocab-size", 265, "--out", out)
    found = re.search(r"([\d.]+) bytes per token", text)
    assert found is not None
    assert float(found[1]) > 2
    assert f"tokenizer: {out}" in text
    assert "265 tokens" in text
    said = json.loads(dmt_data("prepare", recipe, "--json", "--set", f"data.tokenizer={out}"))
    assert said["vocab_size"] == 265
    assert said["train"]["tokens"] < 6 * 116 / 2


def test_mistakes_come_before_any_work(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too small"):
        dmt_data("tokenizer", recipe, "--vocab-size", 10, "--out", tmp_path / "bpe")
    with pytest.raises(DataError, match="vocabulary has 256"):
        dmt_data("prepare", recipe, "--set", "model.config.vocab_size=256")
