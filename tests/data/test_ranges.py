"""Files in chunks: every row in exactly one of them, whatever the size of the chunks."""

import bz2
import gzip
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from toolkit.data.formats.files import ListedFile, identities
from toolkit.data.listing import list_files
from toolkit.data.streaming.chunks import Chunks
from toolkit.data.streaming.source import texts
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, TextSource

ROWS = [
    "one", "", None, "two\nlines", "três", "[not a list]", '"quoted" \\ \u2028', "x" * 700,
    "123", "ends with CR\r", "last",
]  # fmt: skip
PLAIN = [row for row in ROWS if row is None or not set("\r\n\u2028") & set(row)]
"""What lines of text can hold."""


def lines(rows: list[Any]) -> bytes:
    return b"".join(
        json.dumps({"n": n, "text": row}).encode() + b"\n" for n, row in enumerate(rows)
    )


def write_parquet(path: Path, rows: list[Any]) -> None:
    table = pa.table({"n": range(len(rows)), "text": pa.array(rows, pa.string())})
    parquet.write_table(table, path, row_group_size=3)


def write_arrow(path: Path, rows: list[Any], new: Callable[..., Any]) -> None:
    table = pa.table({"n": range(len(rows)), "text": pa.array(rows, pa.string())})
    with new(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


GOOD = lines(["a"] * 50)
WRITERS: dict[str, Callable[[Path, list[Any]], object]] = {
    "a.jsonl": lambda path, rows: path.write_bytes(lines(rows)),
    "b.jsonl": lambda path, rows: path.write_bytes(b"\xef\xbb\xbf\n" + lines(rows).rstrip()),
    "a.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(lines(rows))),
    "a.jsonl.bz2": lambda path, rows: path.write_bytes(bz2.compress(lines(rows))),
    "a.json": lambda path, rows: path.write_text(json.dumps([{"text": row} for row in rows])),
    "b.json": lambda path, rows: path.write_bytes(lines(rows)),
    "a.txt": lambda path, rows: path.write_text("".join(f"{row or ''}\n" for row in rows)),
    "b.txt": lambda path, rows: path.write_bytes("\r\n".join(r or "" for r in rows).encode()),
    "a.parquet": write_parquet,
    "a.arrow": lambda path, rows: write_arrow(path, rows, ipc.new_stream),
    "b.arrow": lambda path, rows: write_arrow(path, rows, ipc.new_file),
}


def source(path: str, **more: Any) -> HfSource:
    return HfSource.model_validate({"kind": "hf", "path": path, **more})


def read(what: HfSource | TextSource, base: Path, chunk_bytes: int) -> list[list[str]]:
    """The texts of each chunk."""
    files = list_files(what, base)
    chunks = Chunks(files, chunk_bytes, whole=isinstance(what, TextSource))
    return [
        ["".join(document) for part in chunks[number] for document in texts(what, part)]
        for number in range(len(chunks))
    ]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 500, 10**6])
def test_every_row_once_and_in_order(tmp_path: Path, name: str, chunk_bytes: int) -> None:
    rows = PLAIN if ".txt" in name else ROWS
    for copy in ("x-", "y-"):
        WRITERS[name](tmp_path / (copy + name), rows)
    found = read(source(f"*{name}"), tmp_path, chunk_bytes)
    assert [text for chunk in found for text in chunk] == [row or "" for row in rows] * 2
    size = (tmp_path / f"x-{name}").stat().st_size
    if chunk_bytes < size and name.endswith((".jsonl", ".txt", ".parquet")):
        assert len(found) == 2 * -(-size // chunk_bytes)
    else:
        assert len(found) == (1 if chunk_bytes > 2 * size else 2)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=20), max_size=30), st.integers(1, 200))
def test_any_lines(tmp_path: Path, rows: list[str], chunk_bytes: int) -> None:
    for file in tmp_path.glob("*.jsonl"):
        file.unlink()
    middle = len(rows) // 2
    (tmp_path / "1.jsonl").write_bytes(lines(rows[:middle]))
    (tmp_path / "2.jsonl").write_bytes(lines(rows[middle:]))
    found = read(source("*.jsonl"), tmp_path, chunk_bytes)
    assert [text for chunk in found for text in chunk] == rows


def test_lines_of_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.data.formats.lines.BLOCK_BYTES", 16)
    for name in ("a.jsonl", "a.jsonl.gz", "a.txt"):
        rows = PLAIN if ".txt" in name else ROWS
        WRITERS[name](tmp_path / name, rows)
        found = read(source(name), tmp_path, 100)
        assert [text for chunk in found for text in chunk] == [row or "" for row in rows]


def test_documents_that_are_files_are_whole(tmp_path: Path) -> None:
    contents = ["a" * 10, "b" * 300, "c" * 10, "d" * 20, "e" * 90, ""]
    for name, text in zip("012345", contents, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    what = TextSource.model_validate({"kind": "text", "files": ["*.txt"]})
    expected = [[contents[0]], [contents[1]], contents[2:4], contents[4:]]
    assert read(what, tmp_path, 100) == expected


def test_files_are_recognised_without_reading_them(tmp_path: Path) -> None:
    def found(folder: Path) -> list[tuple[str, int, int | str]]:
        return identities(list_files(source("**/*.jsonl"), folder))

    for name in ("one/a.jsonl", "one/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines(ROWS))
    before = found(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    assert found(tmp_path / "two") == before
    os.utime(tmp_path / "two" / "b.jsonl", ns=(0, 5))
    assert found(tmp_path / "two") != before


@pytest.mark.parametrize("chunk_bytes", [30, 10**6])
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", GOOD + b'{"text": 5}\n', "a.jsonl:51: `text` holds a number"),
        ("a.jsonl", GOOD + b'{"text": "x\n' + lines(["b"]), "a.jsonl:51: it is not JSON"),
        ("a.jsonl", GOOD + b'{"text": "\xff"}\n', "a.jsonl:51: it is not UTF-8"),
        ("a.jsonl", GOOD + b"[1]\n", "a.jsonl:51: it is a list"),
        ("a.txt", b"a\n" * 50 + b"\xff\n" + b"b\n" * 50, "a.txt:51: it is not UTF-8"),
        ("a.json", b'[{"text": "a"}, {"text": {}}]', "a.json, row 2: `text` holds a map"),
        ("a.jsonl.gz", gzip.compress(lines(["a"] * 999))[:-20], "cannot read"),
        ("a.parquet", b"PAR1 or not", "cannot read"),
        ("a.arrow", b"not at all", "cannot read"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_named(
    tmp_path: Path, name: str, content: bytes, said: str, chunk_bytes: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        read(source(name), tmp_path, chunk_bytes)
    assert said in raised.value.message and name in raised.value.message


def test_malformed_rows_can_be_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    content = lines(["a"]) + b'{"text": 5}\n[]\n' + lines(["b"]) + b'{"text": "\xff"}\n'
    (tmp_path / "a.jsonl").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert read(source("a.jsonl", malformed="drop"), tmp_path, 10**6) == [["a", "b"]]
    assert "3 malformed rows dropped" in caplog.text
    assert "a.jsonl:2: `text` holds a number" in caplog.text


def test_text_that_is_not_utf8_in_parquet(tmp_path: Path) -> None:
    rows = [b"a"] * 8 + [b"\xff"] + [b"b"] * 3
    column = pa.array(rows, pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=3)
    for chunk_bytes in (100, 10**6):
        with pytest.raises(DataError, match=r"a.parquet, row 9: `text` is not UTF-8"):
            read(source("a.parquet"), tmp_path, chunk_bytes)
        dropping = source("a.parquet", malformed="drop")
        found = read(dropping, tmp_path, chunk_bytes)
        assert [text for chunk in found for text in chunk] == ["a"] * 8 + ["b"] * 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow", "a.txt"])
def test_a_column_that_is_not_there(tmp_path: Path, name: str) -> None:
    WRITERS[name](tmp_path / name, PLAIN)
    with pytest.raises(DataError, match=r"has no column `content`"):
        read(source(name, text_field="content"), tmp_path, 50)


def test_a_file_that_has_changed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    what = source("a.jsonl")
    (chunk,) = Chunks(list_files(what, tmp_path), 10**6, whole=False)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS[::-1]))
    os.utime(tmp_path / "a.jsonl", ns=(0, 0))
    with pytest.raises(DataError, match=r"has changed since"):
        list(texts(what, chunk[0]))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="cannot read"):
        list(texts(what, chunk[0]))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"path": "org/name"}, "cannot load `org/name`"),
        ({"path": "folder", "split": "train[:1%]"}, "`split: train[:1%]` is given, but"),
        ({"path": "memory://none"}, "no file matches memory://none"),
        ({"path": "a.jsonl", "split": "train[:1%]"}, "`split: train[:1%]` with files"),
        ({"path": "a.jsonl", "name": "en"}, "`name: en` with files"),
        ({"path": "a.*"}, "different or unknown kinds"),
    ],
)
def test_sources_that_are_not_streamed(tmp_path: Path, more: dict[str, str], said: str) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("a.jsonl", "a.parquet", "folder/a.jsonl"):
        WRITERS[Path(name).name](tmp_path / name, ROWS)
    with pytest.raises(DataError) as raised:
        list_files(source(**more), tmp_path)
    assert said in raised.value.message


def test_a_listing_is_cut_at_once() -> None:
    files = [ListedFile(Path(f"/data/{n}.jsonl"), 2**30, 0) for n in range(10_000)]
    chunks = Chunks(files, 2**24, whole=False)
    assert len(chunks) == 64 * 10_000
    (last,) = chunks[len(chunks) - 1]
    assert (last.file, last.stop) == (files[-1], 2**30)


@pytest.mark.parametrize("name", WRITERS)
def test_files_in_a_store(tmp_path: Path, name: str) -> None:
    """In ranges, as on a disk."""
    import fsspec

    rows = PLAIN if ".txt" in name else ROWS
    WRITERS[name](tmp_path / name, rows)
    store = fsspec.filesystem("memory")
    store.pipe(f"/bucket/{name}", (tmp_path / name).read_bytes())
    try:
        what = source(f"memory://bucket/*{name}")
        assert read(what, tmp_path, 64) == read(source(name), tmp_path, 64)
        (file,) = list_files(what, tmp_path)
        assert identities([file]) == [(name, (tmp_path / name).stat().st_size, file.version)]
        store.pipe(f"/bucket/{name}", b"x" * file.size)
        with pytest.raises(DataError, match="has changed"):
            for chunk in Chunks([file], 64, whole=False):
                list(texts(what, chunk[0]))
    finally:
        store.store.clear()


@pytest.mark.parametrize("excluded", ["memory://b/left", "memory://b/left/", "memory://b/*/*"])
def test_a_folder_of_a_store_is_left_out(tmp_path: Path, excluded: str) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.pipe({"/b/kept.txt": b"a", "/b/left/out.txt": b"b"})
    what = TextSource(kind="text", files=("memory://b/**/*.txt",), exclude=(excluded,))
    try:
        assert [file.path.name for file in list_files(what, tmp_path)] == ["kept.txt"]
    finally:
        store.store.clear()
