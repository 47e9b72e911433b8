"""The cache of tokenised documents: hits, changes, kills and two processes at once."""

import logging
import os
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.building import train_bpe
from toolkit.data import indexed, tokenized
from toolkit.data.indexed import bin_path, idx_path, write_indexed
from toolkit.data.tokenized import TokenizedData, prepare
from toolkit.data.tokenizers import (
    byte_tokenizer,
    encoder,
    load_tokenizer,
    tokens_before_text,
)
from toolkit.errors import DataError
from toolkit.recipe.schema import MegatronSource, TextSource

EOS = 256


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(10):
        (folder / f"{i}.txt").write_text(f"document {i}\nGrüße")
    (folder / "4empty.txt").touch()
    return folder


def prepare_text(
    corpus: Path, cache: Path, tokenizer: Any = None, **settings: Any
) -> TokenizedData:
    source = TextSource(kind="text", files=(f"{corpus}/*.txt",))
    return prepare(source, tokenizer or byte_tokenizer(), cache=cache, **settings)


def documents_of(data: TokenizedData) -> list[bytes]:
    tokens = data.indexed.tokens.tolist()
    ends = [i for i, token in enumerate(tokens) if token == EOS]
    starts = [0, *(end + 1 for end in ends)]
    return [bytes(tokens[a:b]) for a, b in zip(starts, ends, strict=False)]


EXPECTED = [f"document {i}\nGrüße".encode() for i in range(10)]


def test_changed_file_and_other_tokenizer_are_new_entries(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare_text(corpus, cache)
    (corpus / "3.txt").write_text("Document 3\nGrüße")  # same size
    changed = prepare_text(corpus, cache)
    assert documents_of(changed)[3] == "Document 3\nGrüße".encode()
    train_bpe(["document"], 260, tmp_path / "bpe")
    other = prepare_text(corpus, cache, load_tokenizer(str(tmp_path / "bpe")))
    assert len({first.fingerprint, changed.fingerprint, other.fingerprint}) == 3
    assert len(other.indexed.tokens) < len(changed.indexed.tokens)


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_special_token_spelt_out_in_a_text_is_text(tmp_path: Path, kind: str) -> None:
    """Unless the recipe says otherwise: then it is the token, but no document's end."""
    corpus, text = tmp_path / "corpus", "one<|endoftext|>two"
    corpus.mkdir()
    (corpus / "a.txt").write_text(text)
    tokenizer = byte_tokenizer() if kind == "bytes" else train_bpe([text], 260, tmp_path / "t")
    end = tokenizer.eos_token_id
    as_text = prepare_text(corpus, tmp_path / "cache", tokenizer)
    tokens = as_text.indexed.tokens.tolist()
    assert tokens[-1] == end and end not in tokens[:-1]
    assert "".join(tokenizer.convert_ids_to_tokens(tokens[:-1])) == text
    parsed = prepare_text(corpus, tmp_path / "cache", tokenizer, parse_special=True)
    assert parsed.indexed.tokens.tolist().count(end) == 2
    assert parsed.indexed.n_documents == 1
    assert parsed.fingerprint != as_text.fingerprint


# How Llama 3, Qwen and others split text into words before BPE.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("block", [1, 7, 1000])
@pytest.mark.parametrize("words", [None, WORDS])
def test_long_documents_in_pieces_are_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str | None, block: int
) -> None:
    """Byte-level BPE gives the same tokens for the pieces as for the whole, wherever a block
    of the file ends."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
    from tokenizers.processors import TemplateProcessing

    source = Path(tokenized.__file__).read_text()
    text = source + "a_\n\n\t b1\r\n\r\nGrüße  .\n'll\u00a0x" * 50 + source
    (tmp_path / "long.txt").write_bytes(text.encode())
    tokenizer = train_bpe([text], 600, tmp_path / "bpe")
    if words is not None:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [
                Split(Regex(words), "isolated"),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    end_of_text = tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end_of_text} $A", special_tokens=[(end_of_text, tokenizer.eos_token_id)]
    )
    monkeypatch.setattr("toolkit.data.sources._BLOCK_BYTES", block)
    monkeypatch.setattr(tokenized, "_PIECE_CHARACTERS", 50)
    monkeypatch.setattr(tokenized, "_BATCH_CHARACTERS", 1000)
    data = prepare_text(tmp_path, tmp_path / "cache", tokenizer)
    assert data.indexed.n_documents == 1
    expected = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert data.indexed.tokens.tolist() == expected


@pytest.mark.parametrize("kind", ["bytes", "bpe", "bos"])
@pytest.mark.parametrize("parse_special", [False, True])
def test_batches_write_the_files_of_one_document_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, parse_special: bool
) -> None:
    """Byte for byte, whatever is in the texts and wherever a batch ends."""
    from tokenizers.processors import TemplateProcessing

    chance = np.random.default_rng(1)
    letters = ["a", " ", "\n", "\0", "é", "\u2028", "漢", "😀", "<|endoftext|>", "\ufffd"]
    texts = ["".join(chance.choice(letters, size)) for size in chance.integers(0, 60, 80)]
    (tmp_path / "corpus").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "corpus" / f"{number:03}.txt").write_bytes(text.encode())
    tokenizer = byte_tokenizer()
    if kind != "bytes":
        tokenizer = train_bpe(texts, 300, tmp_path / "bpe")
    if kind == "bos":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", EOS)]
        )
    backend = encoder(tokenizer, parse_special=parse_special)
    before = tokens_before_text(backend)
    encoded = (backend.encode(text, add_special_tokens=False) for text in filter(None, texts))
    expected = [[*before, *one.ids, tokenizer.eos_token_id] for one in encoded]
    write_indexed(tmp_path / "expected", np.uint16, expected)
    for characters in (1, 100, 2**20):
        monkeypatch.setattr(tokenized, "_BATCH_CHARACTERS", characters)
        cache = tmp_path / f"cache {characters}"
        data = prepare_text(tmp_path / "corpus", cache, tokenizer, parse_special=parse_special)
        for path in (bin_path, idx_path):
            assert (
                path(Path(data.name)).read_bytes() == path(tmp_path / "expected").read_bytes()
            )


def test_a_large_file_is_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenized, "_BATCH_CHARACTERS", 2**16)
    monkeypatch.setattr(tokenized, "_PIECE_CHARACTERS", 2**16)
    content = b"word \xc3\xa9\n" * 2**21
    (tmp_path / "large.txt").write_bytes(content)
    tracemalloc.start()
    data = prepare_text(tmp_path, tmp_path / "cache")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**23 <= len(content) / 2
    assert data.indexed.n_documents == 1
    assert data.indexed.tokens[:-1].astype(np.uint8).tobytes() == content


def cut(entry: Path) -> None:
    os.truncate(bin_path(entry), 10)


def altered(entry: Path) -> None:
    """Another token in its place: the same size, and ids that the tokenizer has."""
    tokens = bytearray(bin_path(entry).read_bytes())
    tokens[0] ^= 1
    with bin_path(entry).open("r+b") as file:
        file.write(tokens)


@pytest.mark.parametrize("damage", [cut, altered])
def test_damaged_entry_is_made_again(
    damage: Callable[[Path], None],
    corpus: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = prepare_text(corpus, tmp_path / "cache")
    damage(Path(first.name))
    with caplog.at_level(logging.WARNING):
        again = prepare_text(corpus, tmp_path / "cache")
    assert documents_of(again) == EXPECTED
    assert "damaged" in caplog.text


def test_a_copied_cache_is_hashed_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Path(prepare_text(corpus, tmp_path / "cache").name)
    os.utime(bin_path(entry))
    monkeypatch.setattr(tokenized, "write_tokens", None)  # would fail if it were called
    assert documents_of(prepare_text(corpus, tmp_path / "cache")) == EXPECTED
    monkeypatch.setattr(indexed, "_hash", None)
    assert documents_of(prepare_text(corpus, tmp_path / "cache")) == EXPECTED


def test_cache_that_cannot_be_written(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DataError, match="cannot write to the data cache") as raised:
        prepare_text(corpus, tmp_path / "cache")
    assert "$DMT_CACHE" in raised.value.fix


def test_full_disk(corpus: Path, tmp_path: Path) -> None:
    entry = Path(prepare_text(corpus, tmp_path / "cache").name)
    idx_path(entry).unlink()
    entry.with_name(f"{entry.name}.bin.tmp").symlink_to("/dev/full")
    with pytest.raises(DataError, match="No space left on device"):
        prepare_text(corpus, tmp_path / "cache")
    assert not list(entry.parent.glob("*.tmp"))


def test_a_large_megatron_source_is_not_read_whole(tmp_path: Path) -> None:
    def fingerprint(n_documents: int) -> str:
        """Of 2 GiB of zeros each, which take no space."""
        lengths = np.full(n_documents, 2**30, dtype=np.int64)
        n_bytes = int(lengths.sum()) * 2
        with idx_path(tmp_path / "data").open("wb") as index:
            header = (b"MMIDIDX\0\0", 1, 8, n_documents, n_documents + 1)
            index.write(struct.pack("<9sQBQQ", *header))
            index.write(lengths.astype(np.int32).tobytes())
            index.write((np.arange(n_documents) * 2**31).tobytes())
            index.write(np.arange(n_documents + 1).tobytes())
        with bin_path(tmp_path / "data").open("wb") as tokens:
            tokens.truncate(n_bytes)
        source = MegatronSource(kind="megatron", prefix="data")
        return prepare(source, byte_tokenizer(), cache=tmp_path / "cache").fingerprint

    start = time.process_time()
    assert fingerprint(128) == fingerprint(128) != fingerprint(127)
    assert time.process_time() - start < 10


def test_one_altered_token_of_a_megatron_source_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with its old size and time, up to 16 MiB; unaltered, it is read once."""
    monkeypatch.setattr("toolkit.data.listing._UNSETTLED_S", 0.0)
    tokens = np.zeros(2**22, dtype=np.uint16)
    write_indexed(tmp_path / "data", np.uint16, [tokens])

    def fingerprint() -> str:
        source = MegatronSource(kind="megatron", prefix="data")
        return prepare(source, byte_tokenizer(), cache=tmp_path / "cache").fingerprint

    path = bin_path(tmp_path / "data")
    time.sleep(0.02)  # the resolution of time stamps
    before, status = fingerprint(), path.stat()
    with monkeypatch.context() as context:
        context.setattr("toolkit.data.listing._hash_file", pytest.fail)
        context.setattr("toolkit.data.listing._hash_samples", pytest.fail)
        assert fingerprint() == before
    time.sleep(0.02)
    with path.open("r+b") as file:
        file.seek(len(tokens))  # the middle, in bytes
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert fingerprint() != before


WORKER = """
import sys, time
from pathlib import Path
from toolkit.data import tokenized
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.recipe.schema import TextSource

corpus, cache, release = map(Path, sys.argv[1:])
write_chunks = tokenized.write_chunks

def write_slowly(prefix, dtype, chunks):
    def slow():
        for number, chunk in enumerate(chunks):
            yield chunk
            if number == 3:
                print("half", flush=True)
                while not release.exists():
                    time.sleep(0.01)

    write_chunks(prefix, dtype, slow())

tokenized.write_chunks = write_slowly
tokenized._BATCH_CHARACTERS = 1
source = TextSource(kind="text", files=(f"{corpus}/*.txt",))
data = tokenized.prepare(source, byte_tokenizer(), cache=cache)
print(len(data.indexed.tokens), flush=True)
"""


@contextmanager
def worker(corpus: Path, cache: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that says "half" and stops there until the file `release` exists."""
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, corpus, cache, cache.with_name("release")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
            process.wait()
        finally:
            process.kill()


@pytest.mark.slow
def test_killed_in_the_middle(corpus: Path, tmp_path: Path) -> None:
    """A partial result is never taken for a whole one, and no lock outlives its holder."""
    cache = tmp_path / "cache"
    with worker(corpus, cache) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert [*(cache / "tokens").glob("*.bin.tmp")]
    assert not list((cache / "tokens").glob("*.idx"))
    data = prepare_text(corpus, cache)
    assert documents_of(data) == EXPECTED
    assert idx_path(Path(data.name)).exists()
    assert not list((cache / "tokens").glob("*.tmp"))


@pytest.mark.slow
def test_two_processes_at_once(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with worker(corpus, cache) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "half\n"
        with worker(corpus, cache) as second:
            assert second.stdout is not None
            assert second.stderr is not None
            assert "waiting for it" in second.stderr.readline()
            cache.with_name("release").touch()
            total = str(sum(map(len, EXPECTED)) + len(EXPECTED))
            assert first.stdout.read().split() == [total]
            assert second.stdout.read().split() == [total]  # it did not tokenise itself
    assert (first.returncode, second.returncode) == (0, 0)
