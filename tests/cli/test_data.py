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


CHAT = """
data:
  train: {kind: chat, path: chats.jsonl}
  chat_template: chatml
  packing: greedy
training: {objective: sft, sequence_length: 96, global_batch_size: 1}
model: {config: {max_position_embeddings: 96}}
"""


@pytest.mark.usefixtures("recipe")
def test_show_chats(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "\x1b[31mHey"}]
    rows = [{"messages": turns}, {"messages": turns[:1]}, {"messages": turns}]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chat.yaml").write_text(
        f"extends: recipe.yaml\n{CHAT}".replace("data:", "data:\n  validation_fraction: 0")
    )
    said = json.loads(dmt_data("show", tmp_path / "chat.yaml", "--samples", 1, "--json"))
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
    text = dmt_data("show", tmp_path / "chat.yaml", "--tokens", 60)
    assert "«\\x1b[31mHey" in text and "untrained: 1" in text and "more tokens" in text
    assert "of the tokens are trained (between « and »)" in text


def test_show_text(recipe: Path) -> None:
    """Documents, as the sample is cut from them: the first token of each is not trained."""
    said = json.loads(
        dmt_data(
            "show", recipe, "--json", "--samples", 15, "--set", "data.validation_fraction=0"
        )
    )
    assert said["trained_share"] == 1 - 8 / (8 * 116) and said["counts"] is None
    assert said["lengths"][-1] == {"up_to": 128, "documents": 8}
    documents = said["samples"][14]["documents"]  # tokens 112 … 119; the second begins at 116
    assert [document["tokens"] for document in documents] == [4, 4]
    assert documents[1]["passages"] == [
        {"text": "t", "trained": False},
        {"text": "he ", "trained": True},
    ]


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


def test_a_blend(recipe: Path) -> None:
    """Every source under its own heading, and with its share of the run."""
    texts = f"kind: text, files: [{recipe.parent}/*.txt]"
    sources = f"[{{label: one, {texts}, weight: 3}}, {{label: two, {texts}, weight: 1}}]"
    blend = ("--set", f"data.train={sources}", "--set", "training.steps=4")
    shown = dmt_data("show", recipe, "--samples", 0, *blend).splitlines()
    assert [line.split()[0] for line in shown if "═" in line] == ["one", "two"]
    said = dmt_data("prepare", recipe, *blend)
    assert "one: 75.00% of the samples" in said and "two: 25.00% of the samples" in said


def test_stats(recipe: Path, tmp_path: Path) -> None:
    for number, words in enumerate((3, 3, 200)):
        (tmp_path / f"more{number}.md").write_text("word " * words)
    train = [
        {"kind": "text", "label": "equal", "files": [f"{tmp_path}/*.txt"], "weight": 3},
        {"kind": "text", "label": "more", "files": [f"{tmp_path}/*.md"], "weight": 1},
    ]
    blend = ["--set", f"data.train={json.dumps(train)}", "--set", "data.validation_fraction=0"]
    found = json.loads(dmt_data("stats", recipe, "--json", *blend))
    assert found["equal"] == {
        "documents": 8,
        "tokens": 8 * 116,
        "length_quantiles": dict.fromkeys(
            ["0", "0.05", "0.25", "0.5", "0.75", "0.95", "1"], 116
        ),
        "compared": 8,
        "duplicates": 7,
        "share": 0.75,
    }
    more = found["more"]
    assert (more["documents"], more["tokens"], more["duplicates"]) == (3, 16 + 16 + 1001, 1)
    assert [more["length_quantiles"][at] for at in ("0", "0.5", "0.75", "1")] == [
        16,
        16,
        1001,
        1001,
    ]
    text = dmt_data("stats", recipe, *blend)
    assert "more: 3 documents, 1,033 tokens, 25.00% of the samples" in text
    assert "duplicates: 1 of 3 documents (33.33%)" in text


def test_stats_compare_documents_across_chunks(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolkit.data.packing._CHUNK_TOKENS", 50)
    found = json.loads(dmt_data("stats", recipe, "--json"))["*.txt"]
    assert (found["documents"], found["compared"], found["duplicates"]) == (6, 6, 5)
    assert found["length_quantiles"]["0"] == found["length_quantiles"]["1"] == 116


def test_verify(recipe: Path, tmp_path: Path) -> None:
    dmt_data("prepare", recipe)
    said = json.loads(dmt_data("verify", recipe, "--json"))
    assert (said["checked"], said["damaged"], said["unknown"]) == (1, [], [])
    (tokens,) = (tmp_path / "cache" / "tokens").glob("*.bin")
    content = bytearray(tokens.read_bytes())
    content[100] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(DataError, match="2 files in the data cache are damaged") as raised:
        dmt_data("verify", recipe)
    assert "dmt data prepare" in raised.value.fix
    for path in (tokens, tokens.with_suffix(".idx")):
        path.unlink()
    dmt_data("prepare", recipe)
    assert json.loads(dmt_data("verify", recipe, "--json"))["checked"] == 1


def test_verify_entries_without_a_hash(recipe: Path, tmp_path: Path) -> None:
    dmt_data("prepare", recipe)
    (index,) = (tmp_path / "cache" / "tokens").glob("*.idx")
    index.write_bytes(index.read_bytes()[:-24])
    said = json.loads(dmt_data("verify", recipe, "--json"))
    assert said["checked"] == 0
    assert said["unknown"] == [str(index), str(index.with_suffix(".bin"))]


def test_verify_copies_and_blocks(recipe: Path, tmp_path: Path) -> None:
    from toolkit.data.progress import untracked
    from toolkit.data.remote.blocks import BlockCache
    from toolkit.data.remote.copies import copied
    from toolkit.data.remote.store import list_files

    files = list_files(f"file://{tmp_path}/*.txt")
    copies = copied(files[:2], tmp_path / "cache", untracked)
    BlockCache(tmp_path / "cache" / "remote" / "blocks", 2**30).read(files[0], 0, 10)
    assert json.loads(dmt_data("verify", recipe, "--json"))["checked"] == 3
    copies[1].write_bytes(copies[1].read_bytes().replace(b"cat", b"dog"))
    (block,) = (tmp_path / "cache" / "remote" / "blocks").glob("*/*")
    block.write_bytes(block.read_bytes()[:-1])
    result = CliRunner().invoke(app, ["verify", str(recipe), "--json"])
    assert json.loads(result.stdout)["damaged"] == [str(copies[1]), str(block)]
