"""Training data in a real S3 (moto's server), also one that fails; no credential is shown."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs

from tests.data import s3
from tests.data.building import built
from tests.data.s3 import KEY, SECRET, Store
from tests.dmt import Dmt
from tests.recipe.good import GOOD
from toolkit.data.build import TrainingData
from toolkit.data.indexed import write_indexed
from toolkit.data.remote import list_files

LENGTH = 1024
PAIR = "s3://data/pretrain/tokens"


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with s3.running() as store:
        yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An S3 with the empty bucket `data`; this process reads from it."""
    import fsspec.config

    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    quick = {"config_kwargs": {"read_timeout": 0.5}}
    monkeypatch.setitem(fsspec.config.conf, "s3", quick)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = s3fs.S3FileSystem(skip_instance_cache=True, config_kwargs={})
    bucket.mkdir("data")
    yield server
    server.failures.clear()
    bucket.rm("data", recursive=True)


@pytest.fixture
def put(store: Store) -> Callable[[Path | bytes, str], None]:
    bucket = s3fs.S3FileSystem(skip_instance_cache=True, endpoint_url=store.url)

    def put(content: Path | bytes, key: str) -> None:
        data = content if isinstance(content, bytes) else content.read_bytes()
        bucket.pipe(f"data/{key}", data)

    return put


def build(cache: Path, train: dict[str, Any], **settings: Any) -> TrainingData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DMT_CACHE", str(cache))
        return built(cache.parent, {"train": train, **settings}, LENGTH, 4)


def sequence(data: TrainingData) -> list[list[int]]:
    """Input ids of every training sample, in the order of training."""
    order = data.order.indices(0, len(data.train)).tolist()
    return [data.train.rows(index)[0].input_ids.tolist() for index in order]


def test_listing_and_single_look_ups_agree(put: Any) -> None:
    put(b"0123456789", "web/a.txt")
    put(b"0123", "web/b.txt")
    both = list_files("s3://data/web/*.txt")
    assert [(file.url, file.size) for file in both] == [
        ("s3://data/web/a.txt", 10),
        ("s3://data/web/b.txt", 4),
    ]
    assert [list_files(file.url) for file in both] == [[file] for file in both]
    assert list_files("s3://data/**/*") == both
    assert list_files("s3://no-such-bucket/*") == []


def test_tokens_are_those_of_the_local_pair_although_reads_fail(
    tmp_path: Path, put: Any, store: Store
) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 3000, 300).tolist()
    pair = tmp_path / "tokens"
    write_indexed(pair, np.uint16, (rng.integers(0, 257, length) for length in lengths))
    for ending in (".bin", ".idx"):
        put(tmp_path / f"tokens{ending}", f"pretrain/tokens{ending}")
    put(b"another", "pretrain/tokens.old.bin")
    local = build(tmp_path / "local", {"kind": "megatron", "prefix": str(pair)})
    there = {"kind": "megatron", "prefix": PAIR}
    store.failures.extend(["error", "cut", "", "error", "slow", "", "cut"])
    from_s3 = build(tmp_path / "cache", there)
    assert not store.failures
    assert sequence(from_s3) == sequence(local)
    assert build(tmp_path / "cache", there).fingerprint == from_s3.fingerprint
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files
    for canary in (SECRET, KEY):
        assert not [path for path in files if canary.encode() in path.read_bytes()]


DOCUMENTS = [f"document {number}: " + "grüße, " * (number % 50) for number in range(300)]


@pytest.fixture
def documents(tmp_path: Path, put: Any) -> Path:
    """The same documents as files in a folder, and in the store under `web`."""
    folder = tmp_path / "web"
    (folder / "part").mkdir(parents=True)
    for number, text in enumerate(DOCUMENTS[:9]):
        (folder / f"{number}.txt").write_text(text)
    for half, texts in enumerate((DOCUMENTS[:200], DOCUMENTS[200:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "part" / f"{half}.jsonl").write_text(lines)
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]}
        for text in DOCUMENTS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    for path in folder.glob("**/*.*"):
        put(path, f"web/{path.relative_to(folder)}")
    return folder


@pytest.mark.parametrize(
    ("train", "settings"),
    [
        ({"kind": "text", "files": ["{}/*.txt", "{}/part/*l"]}, {}),
        ({"kind": "hf", "path": "{}/part/*.jsonl"}, {}),
        ({"kind": "chat", "path": "{}/chats.jsonl"}, {"chat_template": "chatml"}),
    ],
)
def test_files_are_those_of_a_folder(
    tmp_path: Path,
    documents: Path,
    store: Store,
    train: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    def at(place: str) -> dict[str, Any]:
        return {
            key: [one.format(place) for one in value]
            if isinstance(value, list)
            else value.format(place)
            for key, value in train.items()
        }

    local = build(tmp_path / "local", at(str(documents)), **settings)
    from_s3 = build(tmp_path / "cache", at("s3://data/web"), **settings)
    assert sequence(from_s3) == sequence(local)
    assert from_s3.fingerprint == local.fingerprint, "the same contents, wherever they lie"
    store.asked.clear()
    build(tmp_path / "cache", at("s3://data/web"), **settings)
    assert not [one for one in store.asked if one[2]], "nothing is read again"


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("s3://data/tokens/none", "there is no file s3://data/tokens/none.idx"),
        (f"s3://{KEY}:{SECRET}@data/tokens", "data.train"),
    ],
    ids=["missing", "a login in the URL"],
)
def test_one_error(tmp_path: Path, store: Store, dmt: Dmt, prefix: str, message: str) -> None:
    """Without the secret; a check does not ask the network."""
    assert store.url
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(GOOD)
    train = f"data.train={json.dumps({'kind': 'megatron', 'prefix': prefix})}"
    printed = dmt("data", "prepare", recipe, "--set", train, code=2)
    assert message in printed.err and "Traceback" not in printed.err
    assert SECRET not in printed.out + printed.err
    if SECRET not in prefix:
        store.asked.clear()
        dmt("check", recipe, "--set", train)
        assert not store.asked
