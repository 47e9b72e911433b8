"""What `dmt check` finds of local files: the rows of test_every_mistake are what ranks met."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from safetensors.numpy import save, save_file

from tests.data.building import train_bpe
from tests.recipe.good import GOOD
from toolkit.cli.check import judge
from toolkit.data.build import build_data
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.errors import DataError
from toolkit.intake.load import load_recipe

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good recipe in a folder with files of every kind."""
    monkeypatch.chdir(tmp_path)
    rows: dict[str, list[dict[str, Any]]] = {
        "text": [{"text": None}, {"text": "one", "id": 1}],
        "body": [{"body": "one", "id": 1}],
        "chat": [{"messages": CHAT}],
        "plain": [{"prompt": "Hi", "completion": "Hello"}],
    }
    for name, lines in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        pa.parquet.write_table(pa.Table.from_pylist(lines), tmp_path / f"{name}.parquet")
    far = pa.array([2**31 - 1], pa.date32())
    pa.parquet.write_table(pa.table({"text": ["one"], "n": far}), tmp_path / "far.parquet")
    lines = [json.dumps({"messages": CHAT}), "{", json.dumps({"messages": CHAT, "fns": None})]
    (tmp_path / "malformed.jsonl").write_text("\n".join(lines))
    (tmp_path / "half.bin").touch()
    (tmp_path / "empty").mkdir()
    byte_tokenizer().save_pretrained(tmp_path / "bytes-folder")
    train_bpe(["a" * 50], 258, tmp_path / "bpe")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    (tmp_path / "recipe.yaml").write_text(GOOD)
    return tmp_path / "recipe.yaml"


def hf(path: str, field: str = "text") -> str:
    return f"data.train={{kind: hf, path: ./{path}, text_field: {field}}}"


SMALL = "model.config.vocab_size=257"
TEXT_FIELD, TRAIN_PATH = "data.train.text_field", "data.train.path"
SFT = "training.objective=sft"
MISTAKES: list[tuple[tuple[str, ...], str, str]] = [
    (("data.tokenizer=./missing",), "data.tokenizer", "there is no folder"),
    (("data.tokenizer=./empty",), "data.tokenizer", "holds no tokenizer.json"),
    (("data.tokenizer=./broken",), "data.tokenizer", "cannot"),
    (("data.tokenizer=./bpe", SMALL), "data.tokenizer", "258 tokens"),
    (("model.config.vocab_size=256",), "data.tokenizer", "257 tokens"),
    (("data.train={kind: text, files: [./no*.txt]}",), "data.train.files", "no file matches"),
    (("data.train={kind: megatron, prefix: ./half}",), "data.train.prefix", "no file"),
    (("data.train.files=[s4://b/*.txt]",), "data.train.files", "nothing reads `s4://`"),
    (("data.train.files=['memory://b/a', ./no.txt]",), "data.train.files", "no file matches"),
    ((hf("missing.jsonl"),), TRAIN_PATH, "no file matches"),
    ((hf("empty"),), TRAIN_PATH, "is a folder"),
    ((hf("text.jsonl"), "data.train.split=train_sft"), TRAIN_PATH, "`split: train_sft`"),
    ((hf("body.jsonl"),), TEXT_FIELD, "its columns are body, id"),
    ((hf("body.parquet", "id"),), TEXT_FIELD, "not text"),
    ((hf("chat.jsonl"),), TEXT_FIELD, "`messages` holds chats"),
    ((hf("chat.parquet", "messages"),), TEXT_FIELD, "`messages` holds chats"),
    *(
        (
            (f"data.train={{kind: chat, path: ./{file}, {more}}}", SFT, *others),
            f"data.{key}",
            says,
        )
        for file, more, others, key, says in (
            ("body.jsonl", "", (), "train.columns", "it has the columns body, id"),
            ("chat.parquet", "format: alpaca", (), "train.columns", "no column `instruction`"),
            ("chat.jsonl", "columns: {messages: talk}, format: messages", (), "train.columns",
             "no column `talk`"),
            ("chat.jsonl", "columns: {tools: fns}", (), "train.columns", "no column `fns`"),
            ("malformed.jsonl", "", ("data.chat_template=chatml",), "train.path",
             "malformed.jsonl:2: it is not JSON"),
            ("chat.jsonl", "", (), "chat_template", "`bytes` has no template"),
            ("chat.jsonl", "", ("data.chat_template=./no.jinja",), "chat_template",
             "cannot read"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "key", "says"), MISTAKES)
def test_every_mistake(recipe: Path, overrides: tuple[str, ...], key: str, says: str) -> None:
    """Check finds what the ranks would, with the place and a fix."""
    (problem,) = judge(recipe, overrides).problems
    assert problem.key == key and says in problem.found
    assert problem.file and problem.allowed and problem.fix
    if says == "`messages` holds chats":
        assert "kind: chat" in problem.fix
    loaded = load_recipe(recipe, overrides)
    with pytest.raises(DataError):
        build_data(loaded.data, loaded.training, (loaded.model.config or {})["vocab_size"])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (None, "b.safetensors cannot be read: No such file"),
        (lambda data: data[:-1], "b.safetensors cannot be read: .*file not fully covered"),
        (lambda data: data[:20], "b.safetensors cannot be read: .*invalid header length"),
        (lambda _: save({"z": np.zeros(9)}), "has no tensor y, though .*index.json says so"),
    ],
)
def test_weights_that_are_not_whole(
    recipe: Path, damage: Callable[[bytes], bytes] | None, says: str
) -> None:
    folder = recipe.parent / "weights"
    folder.mkdir()
    names = {"x": "a.safetensors", "y": "b.safetensors"}
    for name, file in names.items():
        save_file({name: np.zeros(9)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    overrides = ("model.hub=./weights", "model.init=pretrained")
    assert not judge(recipe, overrides).problems
    shard = folder / "b.safetensors"
    damaged = None if damage is None else damage(shard.read_bytes())
    shard.unlink()
    if damaged is not None:
        shard.write_bytes(damaged)
    (problem,) = judge(recipe, overrides).problems
    assert problem.key == "model.hub" and re.search(says, problem.found) and problem.fix


def test_a_folder_of_adapters(recipe: Path) -> None:
    """Random weights would not be what its user wants."""
    (recipe.parent / "lora").mkdir()
    (recipe.parent / "lora/adapter_config.json").write_text("{}")
    (problem, *_) = judge(recipe, ("model.hub=./lora", "model.init=pretrained")).problems
    assert problem.key == "model.hub" and "merge_and_unload" in problem.fix


def test_brackets_in_the_folder_of_a_recipe(recipe: Path) -> None:
    """Its name is no glob."""
    folder = recipe.parent / "exp[1]"
    folder.mkdir()
    for name in ("recipe.yaml", "text.jsonl"):
        (recipe.parent / name).rename(folder / name)
    (folder / "one.txt").write_text("one")
    recipe = folder / "recipe.yaml"
    for source in (
        "kind: text\n    files: ['*.txt']",
        "kind: text\n    files: ['?ne.txt', './one.txt']",
        "kind: hf\n    path: 'te*.jsonl'",
        "kind: hf\n    path: ./text.jsonl",
    ):
        recipe.write_text(re.sub(r"kind: text\n    files: .*", source, GOOD))
        assert source in recipe.read_text() and not judge(recipe).problems


def test_a_later_file_without_the_column(recipe: Path) -> None:
    several = 'data.train={kind: hf, path: "./[bt]*.jsonl"}'
    (problem,) = judge(recipe, (several,)).problems
    assert problem.key == TRAIN_PATH
    assert "body.jsonl has no column `text`, as other files have" in problem.found


@pytest.mark.parametrize(
    "override",
    [
        hf("text.jsonl"),
        hf("body.parquet", "body"),
        hf("far.parquet"),  # with a date that Python does not have
        hf("text.jsonl, split: 'train[:50%]'"),
        "data.tokenizer=./bytes-folder",
        "data.tokenizer=some/hub-id",
        "data.train={kind: hf, path: some/dataset}",
        "data={train: {kind: chat, path: ./chat.jsonl}, tokenizer: some/hub-id}",
        "data={train: {kind: chat, path: ./malformed.jsonl, malformed: drop, "
        "columns: {tools: fns}}, "
        "tokenizer: some/hub-id}",
        "data={train: {kind: chat, path: ./plain.jsonl}}",
        "data.train={kind: text, files: ['memory://none/*.txt']}",
        "data.train={kind: megatron, prefix: 'memory://none'}",
        "data={train: {kind: chat, path: 'memory://none/a.jsonl'}}",
    ],
)
def test_what_is_right_or_elsewhere_passes(recipe: Path, override: str) -> None:
    overrides = (override, SFT) if "kind: chat" in override else (override,)
    assert not judge(recipe, overrides).problems
