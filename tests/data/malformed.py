"""Data files that are wrong, each written by a function; what an error must name of them."""

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.indexed import bin_path, idx_path, write_indexed

GOOD = '{"text": "good"}\n'


@dataclass(frozen=True)
class Case:
    """A file that is wrong."""

    name: str
    """The path that the recipe names; its ending chooses the reader."""
    write: Callable[[Path], object]
    """Writes it there."""
    says: str
    """Part of the message."""


def lines(*rows: object) -> Callable[[Path], object]:
    """JSON lines; a string is written as it is."""
    text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    return lambda path: path.write_text(text)


def raw(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


def zipped(text: str, keep: float = 1.0) -> Callable[[Path], object]:
    content = gzip.compress(text.encode())
    return raw(content[: int(len(content) * keep)])


def parquet(**columns: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(columns), path)

    return write


def cut_parquet(keep: float) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        parquet(text=["x" * 1000] * 100)(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * keep)])

    return write


class Trap:
    """Executes code when it is unpickled."""

    def __init__(self, flag: Path) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return (Path.touch, (self.flag,))


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps(Trap(path.with_name("executed"))))


def invalid_utf8_in_parquet(path: Path) -> None:
    """Arrow does not look whether bytes that are called a string are one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = pa.array([b"good", b"caf\xe9", b"good"]).view(pa.string())
    pq.write_table(pa.table({"text": texts}), path)


def two_kinds(path: Path) -> None:
    path.with_name("a.mixed.jsonl").write_text(GOOD)
    parquet(text=["x"])(path.with_name("b.mixed.parquet"))


def second_is_cut(path: Path) -> None:
    parquet(text=["x"])(path.with_name("part-1.parquet"))
    cut_parquet(0.9)(path.with_name("part-2.parquet"))


def folder(**files: Callable[[Path], object]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        path.mkdir()
        for name, contents in files.items():
            contents(path / name.replace("__", "."))

    return write


LONG_ROW = '{"text": "%s"}\n' % ("long " * 2000)
DEEP = f'{GOOD}{{"text": "x", "other": {"[" * 60_000}{"]" * 60_000}}}\n'.encode()
LATIN_1 = (GOOD * 2).encode() + '{"text": "Grüße"}\n'.encode("latin-1")
ROWS = [
    Case("cut.jsonl.gz", zipped(LONG_ROW * 200, 0.5), "cut.jsonl.gz: Compressed file ended"),
    Case("not-gzip.jsonl.gz", lines(GOOD), "not-gzip.jsonl.gz: Not a gzipped file"),
    Case("latin1.jsonl", raw(LATIN_1), "latin1.jsonl:3: it is not UTF-8 (byte 0xfc at 13)"),
    Case("quote.jsonl", lines(GOOD, GOOD, '{"text": "never\n', GOOD), "quote.jsonl:3: it is"),
    Case("list.jsonl", lines(GOOD, "[1, 2]\n", GOOD), "list.jsonl:2: it is a list"),
    Case("two.jsonl", lines(GOOD, '{"text": "a"} x\n'), "two.jsonl:2: it is not JSON (Extra"),
    Case("later.jsonl", lines(GOOD, {"text": 5}), "later.jsonl:2: `text` holds a number"),
    Case("nested.jsonl", lines({"text": {"body": "x"}}), "nested.jsonl:1: `text` holds a map"),
    Case("column.jsonl", lines({"content": "x"}), "no column `text`; its columns are content"),
    Case("null.jsonl", lines({"text": None}), "every document is empty"),
    Case("empty.jsonl", raw(b""), "`empty.jsonl` has no rows"),
    Case("blank.jsonl", raw(b"\n\n\n"), "`blank.jsonl` has no rows"),
    Case("deep.jsonl", raw(b"[" * 100_000), "deep.jsonl: it is nested too deeply"),
    Case("deep-row.jsonl", raw(DEEP), "deep-row.jsonl:2: it is nested too deeply"),
    Case(
        "digits.jsonl", raw(b'{"text": ' + b"9" * 5000 + b"}"), "number of thousands of digits"
    ),
    Case("half.jsonl", lines(GOOD, '{"text": "\\ud800"}\n'), "half.jsonl:2: `text` holds half"),
    Case("cut.json", raw(b'[{"text": "a"}, {"te'), "cut.json: it is not JSON (Unterm"),
    Case("more.json", raw(b'[{"text": "a"}]\n5'), "(Extra data, line 2, character 1)"),
    Case("empty.parquet", raw(b""), "empty.parquet: Parquet file size is 0 bytes"),
    Case("no-rows.parquet", parquet(text=[]), "`no-rows.parquet` has no rows"),
    Case("part-*.parquet", second_is_cut, "part-2.parquet: Parquet magic bytes not found"),
    Case(
        "map.parquet",
        parquet(text=[{"body": "x"}]),
        "map.parquet, row 1: `text` holds a map, not text",
    ),
    Case(
        "latin1.parquet",
        invalid_utf8_in_parquet,
        "latin1.parquet, rows 1 to 3: 'utf-8' codec can't",
    ),
    Case("pickle.parquet", pickled, "pickle.parquet: Parquet magic bytes not found"),
    Case("cut.arrow", raw(b"ARROW1" * 9), "cut.arrow: "),
    Case("pickle.arrow", pickled, "pickle.arrow: "),
    Case("*.mixed.*", two_kinds, "names files of different or unknown kinds"),
    Case("code", folder(code__py=raw(b"open('executed', 'w')")), "`code` is a folder"),
]


def pair(change: Callable[[Path], object]) -> Callable[[Path], object]:
    """A whole pair in Megatron's format, then changed."""

    def write(prefix: Path) -> None:
        write_indexed(prefix, np.uint16, map(np.arange, (3, 5)))
        change(prefix)

    return write


def index_with(offset: int, value: bytes) -> Callable[[Path], object]:
    """Bytes of the index replaced; the layout is that of toolkit/data/indexed.py."""

    def change(prefix: Path) -> None:
        content = bytearray(idx_path(prefix).read_bytes())
        content[offset : offset + len(value)] = value
        idx_path(prefix).write_bytes(content)

    return pair(change)


def cut(path_of: Callable[[Path], Path], size: int) -> Callable[[Path], object]:
    return pair(lambda prefix: os.truncate(path_of(prefix), size))


HEADER_BYTES = 34
MEGATRON = [
    Case("no-bin", pair(lambda prefix: bin_path(prefix).unlink()), "no-bin.bin"),
    Case("no-idx", pair(lambda prefix: idx_path(prefix).unlink()), "no-idx.idx"),
    Case("cut-bin", cut(bin_path, 10), "cut-bin.bin has 10 bytes; its index says 8 tokens"),
    Case("cut-idx", cut(idx_path, 50), "cut-idx.idx is cut short: 50 bytes"),
    Case("empty-idx", cut(idx_path, 0), "empty-idx.idx is not an index"),
    Case("pickle", pair(lambda prefix: pickled(idx_path(prefix))), "pickle.idx is not an"),
    Case("version", index_with(9, b"\2"), "version 2, token type"),
    Case("floats", index_with(17, b"\6"), "version 1, token type 6"),
    Case("too-many", index_with(18, b"\xff" * 8), "too-many.idx is cut short"),
    Case(
        "negative",
        index_with(HEADER_BYTES, struct.pack("<i", -3)),
        "negative.idx: its sequences do not lie end to end",
    ),
    Case(
        "overlap",
        index_with(HEADER_BYTES + 4 * 2 + 8, struct.pack("<q", 2)),
        "overlap.idx: its sequences do not lie end to end",
    ),
    Case(
        "marks",
        index_with(HEADER_BYTES + 12 * 2, struct.pack("<q", 99)),
        "marks.idx: document marks lie outside its sequences",
    ),
]
