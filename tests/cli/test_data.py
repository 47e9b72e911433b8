"""`dmt data`, on real files."""

import json
from pathlib import Path

import pytest

from tests.dmt import Dmt

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


def test_prepare(recipe: Path, dmt: Dmt) -> None:
    said = dmt("data", "prepare", recipe, "--json").json
    assert said["train"] == {
        "documents": 6,
        "tokens": 6 * 116,
        "samples": 86,
        "tokens_per_epoch": 86 * 8,
    }
    assert said["validation"]["documents"] == 2
    assert said["vocab_size"] == 257
    text = dmt("data", "prepare", recipe).out
    assert "train: 6 documents, 696 tokens, 86 samples of 8" in text


CHAT = """
data:
  train: {kind: chat, path: chats.jsonl}
  chat_template: chatml
  packing: greedy
training: {objective: sft, sequence_length: 96, global_batch_size: 1}
model: {config: {max_position_embeddings: 96}}
"""


@pytest.mark.usefixtures("recipe")
def test_show_chats(tmp_path: Path, dmt: Dmt) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\x1b[31mHey"}]
    rows = [{"messages": turns}, {"messages": turns[:1]}, {"messages": turns, "id": 1, "u": 2}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chat.yaml").write_text(
        f"extends: recipe.yaml\n{CHAT}".replace("data:", "data:\n  validation_fraction: 0")
    )
    said = dmt("data", "show", tmp_path / "chat.yaml", "--samples", 1, "--json").json
    (sample,) = said["samples"]
    (document,) = sample["documents"]
    passages = [(passage["text"], passage["trained"]) for passage in document["passages"]]
    assert passages == [
        ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
        ("\x1b[31mHey<|im_end|>\n<|endoftext|>", True),
    ]
    assert (
        document["tokens"] == sum(len(text) for text, _ in passages) - len("<|endoftext|>") + 1
    )
    assert said["counts"]["untrained"] == 1 and said["counts"]["samples"] == 2
    assert said["counts"]["unread_columns"] == ["id", "u"]
    text = dmt("data", "show", tmp_path / "chat.yaml", "--tokens", 60).out
    assert "«\\x1b[31mHey" in text and "untrained: 1" in text and "more tokens" in text
    assert "unread columns: id, u" in text
    assert "of the tokens are trained (between « and »)" in text


def test_show_text(recipe: Path, dmt: Dmt) -> None:
    """Documents, as the sample is cut from them: the first token of each is not trained."""
    whole = ("--set", "data.validation_fraction=0")
    said = dmt("data", "show", recipe, "--json", "--samples", 15, *whole).json
    assert said["trained_share"] == 1 - 8 / (8 * 116) and said["counts"] is None
    assert said["lengths"][-1] == {"up_to": 128, "documents": 8}
    documents = said["samples"][14]["documents"]  # tokens 112 … 119; the second begins at 116
    assert [document["tokens"] for document in documents] == [4, 4]
    assert documents[1]["passages"] == [
        {"text": "t", "trained": False},
        {"text": "he ", "trained": True},
    ]


def test_a_blend(recipe: Path, dmt: Dmt) -> None:
    """Every source under its own heading, and with its share of the run."""
    texts = f"kind: text, files: [{recipe.parent}/*.txt]"
    sources = f"[{{label: one, {texts}, weight: 3}}, {{label: two, {texts}, weight: 1}}]"
    blend = ("--set", f"data.train={sources}", "--set", "training.steps=4")
    shown = dmt("data", "show", recipe, "--samples", 0, *blend).out.splitlines()
    assert [line.split()[0] for line in shown if "═" in line] == ["one", "two"]
    said = dmt("data", "prepare", recipe, *blend).out
    assert "one: 75.00% of the samples" in said and "two: 25.00% of the samples" in said
