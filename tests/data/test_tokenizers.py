"""The shipped tokenizer, trained ones, and what is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.data.chat.template import ChatTemplate
from toolkit.data.tokenized import prepare
from toolkit.data.tokenizers import (
    byte_tokenizer,
    check_vocabulary,
    count_tokens,
    encoder,
    load_tokenizer,
    tokenizer_fingerprint,
)
from toolkit.errors import DataError
from toolkit.recipe.schema import TextSource

BYTES = byte_tokenizer()
_UNREACHABLE = {"NO_PROXY": "*", "no_proxy": "*", "HF_ENDPOINT": "http://127.0.0.1:9"}


@given(st.text())
def test_any_text_survives(text: str) -> None:
    ids = BYTES(text)["input_ids"]
    assert BYTES.decode(ids) == text
    assert ids == list(text.encode())


def test_shipped_tokenizer_loads_back(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    BYTES.save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "Grüße, 世界 🎉\r\n\tx  ."
    assert loaded(text)["input_ids"] == list(text.encode())
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, len(loaded)) == (256, 257)
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(BYTES)


def test_encoder_does_not_truncate(tmp_path: Path) -> None:
    """A tokenizer.json may carry a truncation; training data must not be cut by it."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert len(encoder(loaded, parse_special=True).encode("a" * 100).ids) == 100


def test_a_larger_tokenizer_is_refused_with_the_three_lines_that_add_rows() -> None:
    with pytest.raises(DataError, match="257 tokens") as caught:
        check_vocabulary("bytes", 257, 100)
    assert "model.resize_token_embeddings(257)" in (caught.value.fix or "")


def without_eos(folder: Path) -> None:
    BYTES.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").unlink(missing_ok=True)


def broken(folder: Path) -> None:
    BYTES.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{")


def changed(folder: Path, change: Callable[[Any], object]) -> None:
    BYTES.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def panics(folder: Path) -> None:
    """The Rust library ends with a panic, which is no Exception."""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    changed(folder, lambda content: content.update(normalizer=normalizer))


def panics_later(folder: Path) -> None:
    """A panic once a text is encoded."""
    cut = {"type": "FixedLength", "length": 0}
    changed(folder, lambda content: content.update(pre_tokenizer=cut))


def empty(folder: Path) -> None:
    folder.mkdir()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (without_eos, "no end-of-sequence token"),
        (broken, "cannot load the tokenizer"),
        (empty, "cannot load the tokenizer"),
        (panics, r"cannot load the tokenizer `.*`: Precompiled"),
    ],
)
def test_unusable_folders(tmp_path: Path, make: object, says: str) -> None:
    make(tmp_path / "t")
    with pytest.raises(DataError, match=says) as raised:
        load_tokenizer("t")
    assert raised.value.fix


def test_a_tokenizer_that_panics(tmp_path: Path) -> None:
    panics(tmp_path / "load")
    with pytest.raises(DataError, match=r"load/tokenizer\.json cannot be read: Precompiled"):
        count_tokens("load")
    panics_later(tmp_path / "encode")
    (tmp_path / "a.txt").write_text("text")
    source = TextSource(kind="text", files=("a.txt",))
    tokenizer = load_tokenizer("encode")
    with pytest.raises(DataError, match="cannot encode a text: chunk size"):
        prepare(source, tokenizer, cache=tmp_path)
    with pytest.raises(DataError, match="cannot encode a text: chunk size"):
        ChatTemplate(None, tokenizer)


@pytest.mark.parametrize("name", ["no-such/tokenizer", "./missing", "a b c"])
def test_unreachable_names(name: str) -> None:
    with pytest.raises(DataError) as raised:
        load_tokenizer(name)
    assert "`bytes`" in raised.value.fix


def test_a_hub_that_is_not_reachable_is_one_line(tmp_path: Path) -> None:
    """transformers alone retries for 50 s, and prints ten lines."""
    code = "from toolkit.data.tokenizers import load_tokenizer; load_tokenizer('owner/name')"
    env = {**os.environ, **_UNREACHABLE, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert "the hub is not reachable, and its local cache does not hold it" in done.stderr
    assert "etry" not in done.stderr
