"""Documents of MDS shards, and every way in which shards and index can be wrong."""

import hashlib
import json
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.data.malformed import Trap
from tests.extras.formats.shards import Row, write_mds
from tests.recipe.good import GOOD
from toolkit.cli.check import judge
from toolkit.cli.main import main
from toolkit.data.listing import list_files
from toolkit.data.records import open_records
from toolkit.data.sources import Documents, RowDocuments, open_source
from toolkit.data.streaming.chunks import Chunks
from toolkit.data.streaming.source import texts
from toolkit.data.tokenized import prepare
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.schema import ChatSource, HfSource

COLUMNS = {"text": "str", "id": "int", "picture": "bytes", "short": "uint16", "after": "str"}
TEXTS = ["first", "", "Grüße\nzwei", "x" * 70_000]
ROWS: list[Row] = [
    {"text": text, "id": -n, "picture": b"\xff\0" * n, "short": n, "after": f"after {n}"}
    for n, text in enumerate(TEXTS)
]
PLAIN = {"text": "str"}


def opened(base: Path, path: str = "mds", **settings: Any) -> Documents:
    source = HfSource(kind="hf", path=path, **settings)
    return open_source(source, base=base, cache=base / "cache")


@pytest.mark.parametrize("compression", [None, "zstd", "zstd:7", "gz", "bz2"])
def test_texts_in_the_order_of_the_index(tmp_path: Path, compression: str | None) -> None:
    if "zstd" in (compression or ""):
        pytest.importorskip("zstandard")
    shards = ROWS[:3], [], ROWS[3:]
    write_mds(tmp_path / "mds", *shards, columns=COLUMNS, compression=compression)
    documents = opened(tmp_path)
    assert len(documents) == 4
    assert list(documents) == TEXTS
    assert ["".join(parts) for parts in documents.in_parts()] == TEXTS
    after = opened(tmp_path, text_field="after")
    assert list(after) == [f"after {n}" for n in range(4)]
    assert after.fingerprint != documents.fingerprint


def test_shards_in_folders(tmp_path: Path) -> None:
    """As an index has them that was made of several."""
    write_mds(tmp_path / "mds", ROWS[:2], columns=COLUMNS)
    write_mds(tmp_path / "mds" / "b", ROWS[2:], columns=COLUMNS)
    index = json.loads((tmp_path / "mds/index.json").read_text())
    (more,) = json.loads((tmp_path / "mds/b/index.json").read_text())["shards"]
    more["raw_data"]["basename"] = "b/shard.00000.mds"
    index["shards"].append(more)
    (tmp_path / "mds/index.json").write_text(json.dumps(index))
    assert list(opened(tmp_path)) == TEXTS


def test_rows_are_counted_without_reading_shards(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", ROWS[:3], ROWS[3:], columns=COLUMNS)
    documents = opened(tmp_path)
    (tmp_path / "mds/shard.00001.mds").unlink()
    assert len(documents) == 4


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    write_mds(tmp_path / "a", ROWS, columns=COLUMNS)
    write_mds(tmp_path / "b", ROWS, columns=COLUMNS)
    write_mds(tmp_path / "c", ROWS[1:], columns=COLUMNS)
    first, same, other = (opened(tmp_path, name).fingerprint for name in "abc")
    assert first == same != other


def test_an_index_of_something_else(tmp_path: Path) -> None:
    """A folder of JSON is still one."""
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds/index.json").write_text('{"text": "one", "shards": 3}')
    assert list(opened(tmp_path)) == ["one"]


@pytest.fixture
def store() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_a_remote_folder(tmp_path: Path, store: Any) -> None:
    write_mds(tmp_path / "mds", ROWS[:3], ROWS[3:], columns=COLUMNS, compression="gz")
    for file in (tmp_path / "mds").iterdir():
        store.pipe(f"/bucket/web/{file.name}", file.read_bytes())
    documents = opened(tmp_path, "memory://bucket/web")
    assert isinstance(documents, RowDocuments) and list(documents) == TEXTS
    assert documents.fingerprint == opened(tmp_path).fingerprint


def not_utf8(folder: Path) -> None:
    rows: list[Row] = [{"text": "one"}, {"text": b"\xff\xfe"}, {"text": "three"}]
    write_mds(folder, rows, columns=PLAIN)


def test_malformed_texts_are_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    not_utf8(tmp_path / "mds")
    dropping = opened(tmp_path, malformed="drop")
    assert list(dropping) == ["one", "three"]
    assert "1 malformed rows dropped" in caplog.text
    assert "shard.00000.mds, document 2: `text` is not UTF-8" in caplog.text
    with pytest.raises(DataError, match="more than 0 rows are malformed"):
        list(opened(tmp_path, malformed="drop", malformed_limit=0))


Spoil = Callable[[Path], object]
SHARD = "shard.00001.mds"


def of_index(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """The entry of the second shard, changed."""

    def spoil(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index["shards"][1])
        (folder / "index.json").write_text(json.dumps(index))

    return spoil


def of_shard(change: Callable[[bytearray], object]) -> Spoil:
    """The second shard changed, and the index made to fit it."""

    def spoil(folder: Path) -> None:
        content = bytearray((folder / SHARD).read_bytes())
        change(content)
        (folder / SHARD).write_bytes(content)
        raw = {"bytes": len(content), "hashes": {"md5": hashlib.md5(content).hexdigest()}}
        of_index(lambda shard: shard["raw_data"].update(raw))(folder)

    return spoil


def put(offset: int, value: int) -> Callable[[bytearray], None]:
    """An uint32 of the shard replaced."""
    return lambda content: struct.pack_into("<I", content, offset, value)


def first_size(content: bytearray) -> None:
    """The first document's first size, too large."""
    put(struct.unpack_from("<I", content, 4)[0], 10**6)(content)


def flipped(folder: Path) -> None:
    content = bytearray((folder / SHARD).read_bytes())
    content[-1] ^= 1
    (folder / SHARD).write_bytes(content)


def no_shards(folder: Path) -> None:
    for file in folder.glob("*.mds"):
        file.unlink()


def pickles(folder: Path) -> None:
    trap = pickle.dumps(Trap(folder / "executed"))
    write_mds(folder, [{"text": "a", "x": trap}], columns={"text": "str", "x": "pkl"})


def zipped(spoil: Spoil) -> Spoil:
    def write(folder: Path) -> None:
        (folder / SHARD).unlink()
        (folder / "shard.00000.mds").unlink()
        write_mds(folder, ROWS[:2], ROWS[2:], columns=COLUMNS, compression="gz")
        spoil(folder)

    return write


def raw_bytes(shard: dict[str, Any]) -> None:
    shard["raw_data"]["bytes"] -= 1


def swapped(shard: dict[str, Any]) -> None:
    names = shard["column_names"]
    first, last = names.index("after"), names.index("text")
    names[first], names[last] = names[last], names[first]


SPOILT: list[tuple[Spoil, str]] = [
    (lambda folder: os.truncate(folder / SHARD, 1000), f"{SHARD}: it has 1,000 bytes, index"),
    (lambda folder: (folder / SHARD).unlink(), f"{SHARD}: it is missing, and index.json"),
    (no_shards, "shard.00000.mds: it is missing, and index.json"),
    (flipped, f"{SHARD}: its sha1 is"),
    (of_index(lambda shard: shard.update(samples=3)), f"{SHARD}: it holds 2 documents, in"),
    (of_shard(lambda content: content.clear()), f"{SHARD}: it holds 0 documents"),
    (of_shard(lambda content: content.__delitem__(slice(6, None))), f"{SHARD}: it holds 2 do"),
    (of_shard(put(4, 0)), f"{SHARD}: its table of documents"),
    (of_shard(lambda content: content.append(0)), f"{SHARD}: its table of documents"),
    (of_shard(put(8, 2**32 - 1)), f"{SHARD}: the sizes in document 1 do not add up"),
    (of_shard(put(8, 0)), f"{SHARD}: the sizes in document 1 do not add up"),
    (of_shard(first_size), f"{SHARD}: the sizes in document 1 do not add up"),
    (of_shard(lambda content: content.__setitem__(20, 0)), f"{SHARD}: its own columns are not"),
    (of_index(swapped), f"{SHARD}: its own columns are not those in index.json"),
    (of_index(lambda shard: shard.pop("samples")), "index.json: it is no index of MDS shard"),
    (of_index(lambda shard: shard.update(version=3)), "(shards.1.version: "),
    (of_index(lambda shard: shard.update(samples=-1)), "(shards.1.samples: "),
    (of_index(lambda shard: shard["column_names"].pop()), f"{SHARD} has not one encoding and"),
    (
        of_index(lambda shard: shard["raw_data"].update(basename="../secret")),
        "(shards.1.raw_data.basename: ",
    ),
    (
        of_index(lambda shard: shard["raw_data"].update(basename="/etc/passwd")),
        "(shards.1.raw_data.basename: ",
    ),
    (
        of_index(lambda shard: shard["raw_data"].update(hashes={"shake_128": ""})),
        f"{SHARD}: index.json has a hash `shake_128` of it, which is unknown",
    ),
    (lambda folder: os.truncate(folder / "index.json", 99), "index.json: it is no index of M"),
    (lambda folder: (folder / "index.json").unlink(), "cannot read mds/index.json"),
    (lambda folder: (folder / "index.json").write_text("[" * 10**5), "index.json: it is no in"),
    (lambda folder: (folder / "index.json").write_bytes(b"\xff"), "index.json: it is no index"),
    (pickles, "column `x` of shard.00000.mds holds pickles (`pkl`)"),
    (
        lambda folder: write_mds(folder, [{"body": "a"}], columns={"body": "str"}),
        "`mds` has no column `text`; its columns are body",
    ),
    (
        of_index(lambda shard: shard.update(column_names=["a", "b", "c", "d", "e"])),
        "`mds` has no column `text`; its columns are none",
    ),
    (
        lambda folder: write_mds(folder, [{"text": b"a"}], columns={"text": "bytes"}),
        "column `text` of `mds` holds bytes, not text",
    ),
    (lambda folder: write_mds(folder, columns=PLAIN), "no column `text`; its columns are none"),
    (lambda folder: write_mds(folder, [], columns=PLAIN), "every document is empty"),
    (not_utf8, "shard.00000.mds, document 2: `text` is not UTF-8"),
    (zipped(lambda folder: os.truncate(folder / f"{SHARD}.gz", 50)), f"{SHARD}.gz: it has 50 "),
    (zipped(of_index(raw_bytes)), f"{SHARD}.gz: it has 70,"),
    (
        zipped(of_index(lambda shard: shard.update(compression="br"))),
        f"{SHARD}.gz: its compression `br` is not read",
    ),
    (
        zipped(of_index(lambda shard: shard.update(compression="bz2"))),
        f"{SHARD}.gz: Invalid data stream",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "says"), SPOILT)
def test_what_is_spoilt_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_mds(tmp_path / "mds", ROWS[:2], ROWS[2:], columns=COLUMNS)
    spoil(tmp_path / "mds")
    source = HfSource(kind="hf", path="mds")
    with pytest.raises(DataError) as raised:
        prepare(source, byte_tokenizer(), base=Path(), cache=tmp_path / "cache")
    assert says in raised.value.message and raised.value.fix
    assert "\n" not in raised.value.message
    assert not list(tmp_path.rglob("executed"))


def test_what_zstandard_cannot_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    write_mds(tmp_path / "mds", ROWS, columns=COLUMNS, compression="zstd", hashes=())
    path = tmp_path / "mds/shard.00000.mds.zstd"
    content = bytearray(path.read_bytes())
    content[:4] = b"none"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"shard.00000.mds.zstd: "):
        list(opened(tmp_path))
    assert zstandard.ZstdError


def test_zstandard_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mds(tmp_path / "mds", ROWS, columns=COLUMNS, compression="gz")
    of = json.loads((tmp_path / "mds/index.json").read_text())
    of["shards"][0]["compression"] = "zstd:7"
    (tmp_path / "mds/index.json").write_text(json.dumps(of))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(BackendUnavailable, match=r"mds.gz needs the package `zstandard`"):
        list(opened(tmp_path))


@pytest.mark.parametrize("setting", [{"split": "train[:1%]"}, {"name": "en"}])
def test_settings_that_mean_nothing_here(tmp_path: Path, setting: dict[str, str]) -> None:
    write_mds(tmp_path / "mds", ROWS, columns=COLUMNS)
    ((key, value),) = setting.items()
    with pytest.raises(DataError) as raised:
        opened(tmp_path, **setting)
    assert f"`{key}: {value}` is given for MDS shards (`mds`)" in raised.value.message


def test_chats_are_refused(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", ROWS, columns=COLUMNS)
    source = ChatSource(kind="chat", path="mds")
    with pytest.raises(DataError, match="`kind: chat` is given for MDS shards"):
        open_records(source, base=tmp_path, cache=tmp_path / "cache")


STREAMED = ("data.streaming={}", "data.validation_fraction=0", "evaluation.every_steps=null")


@pytest.mark.parametrize(
    ("spoil", "settings", "key", "says"),
    [
        (None, "", None, ""),
        (None, ", text_field: after", None, ""),
        (None, ", text_field: body", "text_field", "no column `body`; its columns are after,"),
        (None, ", text_field: id", "text_field", "holds int, not text"),
        (None, ", split: test", "path", "`split: test`"),
        (pickles, "", "path", "holds pickles"),
        (lambda folder: os.truncate(folder / SHARD, 9), "", "path", f"{SHARD}: it has 9 bytes"),
        (None, STREAMED, None, ""),
    ],
)  # fmt: skip
def test_check(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Spoil | None,
    settings: str | tuple[str, ...],
    key: str | None,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(GOOD)
    write_mds(tmp_path / "mds", ROWS[:2], ROWS[2:], columns=COLUMNS)
    if spoil is not None:
        spoil(tmp_path / "mds")
    more, others = (settings, ()) if isinstance(settings, str) else ("", settings)
    train = f"data.train={{kind: hf, path: ./mds{more}}}"
    problems = judge(tmp_path / "recipe.yaml", (train, *others)).problems
    assert [problem.key for problem in problems] == ([f"data.train.{key}"] if key else [])
    assert all(says in problem.found and problem.fix for problem in problems)


def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text(GOOD)
    write_mds(tmp_path / "mds", ROWS, columns=COLUMNS)
    train = f"data.train={{kind: hf, path: {tmp_path}/mds}}"
    more = ("data.validation_fraction=0", "evaluation.every_steps=null")
    overrides = [part for setting in (train, *more) for part in ("--set", setting)]
    assert main(["data", "show", str(tmp_path / "recipe.yaml"), *overrides]) == 0
    assert "f«irst<|endoftext|>»" in capsys.readouterr().out


def streamed(what: HfSource, base: Path, target: int = 10**9) -> list[str]:
    """All texts of the chunks of about `target` bytes."""
    chunks = Chunks(list_files(what, base), target, whole=False)
    parts = [part for number in range(len(chunks)) for part in chunks[number]]
    return ["".join(one) for part in parts for one in texts(what, part)]


def test_shards_are_chunks(tmp_path: Path, store: Any) -> None:
    """What is wrong with a shard is said as it is of one that is read at once."""
    source = HfSource(kind="hf", path="mds")
    write_mds(tmp_path / "mds", ROWS[:2], ROWS[2:3], ROWS[3:], columns=COLUMNS)
    files = list_files(source, tmp_path)
    assert len(files) == len(Chunks(files, 1, whole=False)) == 3
    assert streamed(source, tmp_path, 1) == TEXTS
    store.put(str(tmp_path / "mds"), "/bucket/mds", recursive=True)
    assert streamed(HfSource(kind="hf", path="memory://bucket/mds"), tmp_path) == TEXTS
    flipped(tmp_path / "mds")
    with pytest.raises(DataError, match=r"shard\.00001\.mds: its sha1 is"):
        streamed(source, tmp_path)
    (tmp_path / "mds" / "index.json").write_text("{}")
    with pytest.raises(DataError, match=r"mds/index\.json: it is no index of MDS shards"):
        list_files(source, tmp_path)
