"""Documents from real files, through globs and through the real `datasets` library."""

import gzip
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.data.files import cache_folder
from toolkit.data.listing import content_fingerprint
from toolkit.data.readers import without_added_nulls
from toolkit.data.records import open_records
from toolkit.data.sources import Documents, open_source
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.schema import ChatSource, HfSource, TextSource

ROWS = [{"text": "first", "id": 1}, {"text": "", "id": 2}, {"text": "Grüße\nzwei", "id": 3}]
TEXTS = ["first", "", "Grüße\nzwei"]


def open_text(*files: str) -> Documents:
    source = TextSource(kind="text", files=files)
    return open_source(source, Path("cache"))


def open_hf(path: str, **settings: Any) -> Documents:
    source = HfSource(kind="hf", path=path, **settings)
    return open_source(source, Path("cache"))


def write_files(base: Path, **contents: str) -> None:
    for name, content in contents.items():
        path = base / name.replace("__", "/").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def test_globs_in_a_fixed_order(tmp_path: Path) -> None:
    names = [f"{letter}.txt" for letter in "qwertyuiopasdfghjkl"]
    for name in names:  # in no order that a file system would list them in
        (tmp_path / name).write_text(name)
    assert list(open_text("*.txt")) == sorted(names)
    write_files(tmp_path, d__z_txt="z", d__a_txt="a", d__sub__m_txt="m", d__c_txt="c")
    assert list(open_text("d/**/*.txt")) == ["a", "c", "m", "z"]
    # pattern by pattern, each file once
    assert list(open_text("d/z.txt", "d/**/*.txt")) == ["z", "a", "c", "m"]
    assert list(open_text(str(tmp_path / "q.txt"))) == ["q.txt"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PAR1 and text", "a Parquet, Arrow or compressed file"),
        (bytes(range(256)) * 4, "of its first 1,024 characters, 516 are NUL or not UTF-8"),
        ("Grüße aus UTF-16".encode("utf-16"), "are NUL or not UTF-8"),
    ],
)
def test_binary_files_are_not_text(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=what) as raised:
        list(open_text("a.txt"))
    assert "kind: hf" in str(raised.value.fix)


def test_no_match_names_the_glob(tmp_path: Path) -> None:
    write_files(tmp_path, a_txt="a")
    (tmp_path / "folder").mkdir()
    for pattern in ("*.md", "folder", "{stdlibs}/*.py"):
        with pytest.raises(DataError) as raised:
            open_text("a.txt", pattern)
        assert f"`{pattern}`" in raised.value.message
        assert raised.value.fix


def test_text_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "crlf.txt").write_bytes(b"one\r\ntwo\r")
    assert list(open_text("crlf.txt")) == ["one\r\ntwo\r"]


def test_not_utf8_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block ends within a character."""
    monkeypatch.setattr("toolkit.data.sources._BLOCK_BYTES", 10)
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe in two\xf0\x9f caf\xe9s")
    (tmp_path / "c.txt").write_text("good")
    with caplog.at_level(logging.WARNING):
        assert list(open_text("*.txt")) == [
            "caf\ufffd",
            "\ufffd\ufffd in two\ufffd caf\ufffds",
            "good",
        ]
    assert len(caplog.records) == 1
    assert "not UTF-8: 2 of 3 files" in caplog.text


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    write_files(tmp_path, a_txt="a", b_txt="b")
    first = open_text("*.txt").fingerprint
    assert open_text("*.txt").fingerprint == first
    assert open_text("b.txt", "a.txt").fingerprint != first
    (tmp_path / "a.txt").write_text("x")  # same size, perhaps the same time stamp
    changed = open_text("*.txt").fingerprint
    assert changed != first
    (tmp_path / "a.txt").write_text("a")
    assert open_text("*.txt").fingerprint == first
    (tmp_path / "moved").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert open_text("moved/*.txt").fingerprint == first


def test_contents_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, a_txt="a")
    files, cache = [tmp_path / "a.txt"], tmp_path / "cache"
    monkeypatch.setattr("toolkit.data.listing._UNSETTLED_S", 60.0)
    content_fingerprint(files, cache)
    assert not cache.exists()  # a file that has just changed may change again unnoticed
    monkeypatch.setattr("toolkit.data.listing._UNSETTLED_S", 0.0)
    time.sleep(0.02)
    fingerprint = content_fingerprint(files, cache)
    monkeypatch.setattr("toolkit.data.listing._hash_file", None)  # would fail if it were called
    assert content_fingerprint(files, cache) == fingerprint


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DMT_CACHE", "/from/environment")
    assert cache_folder() == Path("/from/environment")
    monkeypatch.setenv("DMT_CACHE", "mine")
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("DMT_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "dmt"
    monkeypatch.setenv("DMT_CACHE", "s3://bucket/cache")
    with pytest.raises(DataError, match="which is a URL"):
        cache_folder()


def write_jsonl(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def test_hf_file_kinds(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_jsonl(tmp_path / "data.jsonl")
    (tmp_path / "data.json").write_text(json.dumps(ROWS))
    zipped = gzip.compress((tmp_path / "data.jsonl").read_bytes())
    (tmp_path / "data.jsonl.gz").write_bytes(zipped)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")
    for kind in ("json", "jsonl", "jsonl.gz", "parquet"):
        assert list(open_hf(f"data.{kind}")) == TEXTS, kind
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert list(open_hf("lines.txt")) == ["one", "", "two"]
    (tmp_path / "null.jsonl").write_text('{"text": null}\n{"text": "x"}\n')
    assert list(open_hf("null.jsonl")) == ["", "x"]


def test_files_of_save_to_disk(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "two")
    for folder, glob in (("one", "one/data-*.arrow"), ("two", "two/train/data-*.arrow")):
        with pytest.raises(DataError, match="is a folder") as raised:
            open_hf(folder)
        assert "`data-*.arrow`" in raised.value.fix
        assert list(open_hf(glob)) == TEXTS
    (tmp_path / "one" / "data-00000-of-00001.arrow").touch()
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow is none of the files of"):
        open_hf("one/data-*.arrow")
    assert list(open_hf("one/data-*-of-00002.arrow")) == TEXTS


def test_hf_glob_and_slices(tmp_path: Path) -> None:
    for i in range(4):
        (tmp_path / f"part-{i}.jsonl").write_text(json.dumps({"body": f"text {i}"}) + "\n")
    whole = open_hf("part-*.jsonl", text_field="body")
    assert list(whole) == [f"text {i}" for i in range(4)]
    part = open_hf("part-*.jsonl", text_field="body", split="train[25%:75%]")
    assert list(part) == ["text 1", "text 2"]
    assert part.fingerprint != whole.fingerprint


def test_brackets_in_a_path(tmp_path: Path) -> None:
    """A path that exists is no glob; another may be one."""
    write_files(tmp_path, **{"exp[1]__a_txt": "a", "exp[1]__b[2]_txt": "b", "exp1__c_txt": "c"})
    write_jsonl(tmp_path / "exp[1]" / "d.jsonl")
    for pattern, found in [
        ("exp[1]/a.txt", ["a"]),
        ("exp[1]/b[2].txt", ["b"]),
        ("exp[1]/*.txt", ["c"]),
        ("exp[[]1]/*.txt", ["a", "b"]),
    ]:
        assert list(open_text(pattern)) == found
    assert list(open_hf("./exp[1]/d.jsonl")) == TEXTS


def test_a_revision_is_one_of_the_hub(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match="`revision: main` is given"):
        open_hf("d.jsonl", revision="main")


def test_a_pinned_hub_revision_needs_no_look_at_the_hub() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    documents = open_hf("no-such/dataset", revision=commit)
    assert documents.fingerprint
    with pytest.raises(DataError, match="cannot load"):
        list(documents)


def test_rows_of_a_hub_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as those of files are: the column of the text alone, or without nulls of Arrow."""
    import datasets

    chats = [[{"role": "user"}], [{"content": "Hi"}]]
    rows = [row | {"messages": chats[number % 2]} for number, row in enumerate(ROWS)]
    loaded, asked = datasets.Dataset.from_list(rows), list[object]()
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *names, **more: asked.append((names, more)) or loaded
    )
    assert list(open_hf("org/texts", name="all", split="train[:3]")) == TEXTS
    assert asked[-1] == (("org/texts", "all"), {"split": "train[:3]", "revision": None})
    source = ChatSource(kind="chat", path="org/texts")
    records = list(open_records(source, Path("cache")))
    assert [row for _, row in records] == rows and records[2][0] == "org/texts, row 3"
    with pytest.raises(DataError, match="has no column `body`; its columns are text, id, mess"):
        list(open_hf("org/texts", text_field="body"))


def test_files_need_no_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path, a_txt="a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert list(open_text("a.txt")) == list(open_hf("a.txt")) == ["a"]
    with pytest.raises(BackendUnavailable, match="datasets"):
        list(open_hf("some/dataset"))


@pytest.mark.parametrize("split", ["train", "train[1:]", "train[:50%]+train[-1:]"])
def test_chats_are_those_of_datasets(tmp_path: Path, split: str) -> None:
    """Columns with values of several kinds too, which `datasets` keeps as JSON."""
    import datasets

    calls = [{"function": {"name": "f", "arguments": {"a": value}}} for value in (1, "x", [2])]
    chats = [[{"role": "assistant", "content": None, "tool_calls": [call]}] for call in calls]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"messages": c}) for c in chats))
    files = {"train": str(tmp_path / "a.jsonl")}
    rows = datasets.load_dataset("json", data_files=files, split="train")
    (tmp_path / "folder").mkdir()
    rows.to_parquet(tmp_path / "folder" / "train.parquet")
    rows.save_to_disk(tmp_path / "saved")
    loaded = datasets.load_dataset(str(tmp_path / "folder"), split=split)
    expected = [without_added_nulls(row, loaded.features) for row in loaded]
    for path in ("folder/train.parquet", "saved/*.arrow"):
        source = ChatSource.model_validate({"kind": "chat", "path": path, "split": split})
        records = open_records(source, tmp_path / "cache")
        assert [row for _, row in records] == expected
