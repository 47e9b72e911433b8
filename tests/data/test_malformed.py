"""One clear error for every data file that is wrong; nothing that is in a file is executed."""

import bz2
import gzip
import json
import lzma
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.data.malformed import (
    GOOD,
    LATIN_1,
    LONG_ROW,
    MEGATRON,
    ROWS,
    Case,
    lines,
    raw,
    zipped,
)
from toolkit.data import readers
from toolkit.data.columns import Broken
from toolkit.data.records import open_records
from toolkit.data.sources import open_source
from toolkit.data.tokenized import prepare
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.errors import DataError
from toolkit.recipe.schema import ChatSource, HfSource, MegatronSource, TextSource


@pytest.fixture(autouse=True)
def nothing_is_executed(tmp_path: Path) -> Any:
    yield
    assert not list(tmp_path.rglob("executed"))


def refusal(source: HfSource | MegatronSource | TextSource) -> str:
    with pytest.raises(DataError) as raised:
        prepare(source, byte_tokenizer(), cache=Path("cache"))
    assert raised.value.fix
    assert "\n" not in raised.value.message and "Traceback" not in raised.value.message
    assert not list(Path("cache").rglob("*.bin*"))
    return raised.value.message


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_rows(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path / case.name)
    assert case.says in refusal(HfSource(kind="hf", path=case.name))


@pytest.mark.parametrize("case", MEGATRON, ids=lambda case: case.name)
def test_indexed_files(case: Case, tmp_path: Path) -> None:
    case.write(tmp_path / case.name)
    assert case.says in refusal(MegatronSource(kind="megatron", prefix=case.name))


@pytest.mark.parametrize("kind", ["text", "hf"])
def test_a_file_that_may_not_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As for users other than root, who reads everything."""
    (tmp_path / "secret.jsonl").write_text(GOOD)
    open_path = Path.open

    def refused(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == "secret.jsonl":
            raise PermissionError(13, "Permission denied", str(path))
        return open_path(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refused)
    source: HfSource | TextSource = TextSource(kind="text", files=("secret.jsonl",))
    if kind == "hf":
        source = HfSource(kind="hf", path="secret.jsonl")
    assert "secret.jsonl: Permission denied" in refusal(source)


def test_the_row_is_found_among_several_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(GOOD * 5000)
    (tmp_path / "b.jsonl").write_text(GOOD * 2000 + '{"text": "x" "y"}\n')
    message = refusal(HfSource(kind="hf", path="*.jsonl"))
    assert f"{tmp_path / 'b.jsonl'}:2001: it is not JSON" in message


LONG_LINE = f'{GOOD}{{"text": "{"x" * 2**25}"}}\n'


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", LONG_LINE, "a.jsonl:2"),
        ("a.jsonl.gz", LONG_LINE, "a.jsonl.gz:2"),
        ("a.jsonl.zst", LONG_LINE, "a.jsonl.zst:2"),
        ("a.jsonl.bz2", LONG_LINE, "a.jsonl.bz2:2"),
        ("a.txt.xz", "good\n" + "x" * 2**25, "a.txt.xz:2"),
    ],
)
def test_memory_does_not_grow_with_the_longest_row(
    name: str, content: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kB may hold a row of GB."""
    import zstandard

    packed = {".gz": gzip, ".bz2": bz2, ".xz": lzma, ".zst": zstandard}.get(Path(name).suffix)
    file = tmp_path / "folder" / name
    file.parent.mkdir()
    file.write_bytes(packed.compress(content.encode()) if packed else content.encode())
    settings: Any = {"kind": "hf", "path": f"folder/{name}"}
    monkeypatch.setattr(readers, "LONGEST_ROW_MIB", 1)
    source = HfSource(**settings)

    def read(kind: str) -> object:
        if kind == "chat":
            chats = ChatSource(**settings | {"kind": kind})
            return list(open_records(chats, tmp_path / "cache"))
        return list(open_source(source, tmp_path / "cache"))

    for kind in ("hf", *([] if ".txt" in name else ["chat"])):
        tracemalloc.start()
        with pytest.raises(DataError, match=r"longer than 1 MiB, the limit") as raised:
            read(kind)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert f"{place}: the row is longer" in raised.value.message
        assert peak < 3 * 2**23, kind  # of 2**25, and what is imported for the first time
    monkeypatch.setattr(readers, "LONGEST_ROW_MIB", 33)
    *_, last = open_source(source, tmp_path / "cache")
    assert last == "x" * 2**25


def test_a_list_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 2**20}]))
    monkeypatch.setattr(readers, "LARGEST_LIST_MIB", 1)
    source = HfSource(kind="hf", path="a.json")
    assert "a.json: the list is larger than 1 MiB, the limit" in refusal(source)
    monkeypatch.setattr(readers, "_LIST_LOOKED_AT_MIB", 1)
    assert readers.columns_of(tmp_path / "a.json") == ({}, False), "a check does not read it"


def test_a_zstandard_file_that_is_cut_ends_the_run(tmp_path: Path) -> None:
    """Wherever it is cut, whatever `malformed` says; between two frames, it is whole."""
    import zstandard

    frames = [zstandard.compress((GOOD * n).encode()) for n in (3, 200)]
    whole, settings = b"".join(frames), {"kind": "chat", "path": "a.jsonl.zst"}
    source = ChatSource.model_validate(settings | {"malformed": "drop"})
    for length in range(len(whole) + 1):
        (tmp_path / "a.jsonl.zst").write_bytes(whole[:length])
        records = open_records(source, tmp_path / "cache")
        if length in (0, len(frames[0]), len(whole)):
            assert len(list(records)) == {0: 0, len(whole): 203}.get(length, 3)
        else:
            with pytest.raises(DataError, match=r"cannot read .*a.jsonl.zst"):
                list(records)


def test_columns_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    lines({"text": "a", "id": 1}, {"text": "b", "id": "x"}, {"text": "c"})(tmp_path / "d.jsonl")
    source = HfSource(kind="hf", path="d.jsonl")
    assert list(open_source(source, tmp_path / "cache")) == ["a", "b", "c"]


def test_a_malformed_line_of_chats_concerns_that_line(tmp_path: Path) -> None:
    """It is for `malformed` to say what becomes of it; a file that is cut ends the run."""
    source = ChatSource(kind="chat", path="chats.jsonl")
    raw(b"\xef\xbb\xbf" + LATIN_1 + b"{\n")(tmp_path / "chats.jsonl")
    records = list(open_records(source, tmp_path / "cache"))
    assert [row for _, row in records[:2]] == [json.loads(GOOD)] * 2
    broken = [str(place) for place, row in records if isinstance(row, Broken)]
    assert [place.rpartition(":")[2] for place in broken] == ["3", "4"]
    zipped(LONG_ROW * 200, 0.5)(tmp_path / "chats.jsonl.gz")
    cut_short = source.model_copy(update={"path": "chats.jsonl.gz"})
    with pytest.raises(DataError, match=r"cannot read .*chats.jsonl.gz: "):
        list(open_records(cut_short, tmp_path / "cache"))
