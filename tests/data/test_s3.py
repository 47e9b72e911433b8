"""Training data in an S3 (moto's server) is that of local files; no credential is shown."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import s3fs
from moto.server import ThreadedMotoServer

from tests.data.building import built
from tests.dmt import Dmt
from tests.recipe.good import GOOD
from toolkit.data.build import TrainingData
from toolkit.data.indexed import write_indexed
from toolkit.data.remote import RemoteFile, list_files

SECRET = "canary-of-the-secret-key-0123456789"
KEY = "canary-of-the-key-id"
LENGTH = 1024
Put = Callable[[Path | bytes, str], None]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def put(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Writes to the bucket `data` of an S3, from which this process reads."""
    for name, value in {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    bucket = s3fs.S3FileSystem(skip_instance_cache=True)
    bucket.mkdir("data")

    def put(content: Path | bytes, key: str) -> None:
        data = content if isinstance(content, bytes) else content.read_bytes()
        bucket.pipe(f"data/{key}", data)

    yield put
    bucket.rm("data", recursive=True)


def build(cache: Path, train: dict[str, Any], **settings: Any) -> TrainingData:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DMT_CACHE", str(cache))
        return built(cache.parent, {"train": train, **settings}, LENGTH, 4)


def sequence(data: TrainingData) -> list[list[int]]:
    """Input ids of every training sample, in the order of training."""
    order = data.order.indices(0, len(data.train)).tolist()
    return [data.train.rows(index)[0].input_ids.tolist() for index in order]


def test_listing_and_single_look_ups_agree(put: Put) -> None:
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


def test_tokens_are_those_of_the_local_pair(tmp_path: Path, put: Put) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 3000, 300).tolist()
    pair = tmp_path / "tokens"
    write_indexed(pair, np.uint16, (rng.integers(0, 257, length) for length in lengths))
    for ending in (".bin", ".idx"):
        put(tmp_path / f"tokens{ending}", f"pretrain/tokens{ending}")
    put(b"another", "pretrain/tokens.old.bin")
    local = build(tmp_path / "local", {"kind": "megatron", "prefix": str(pair)})
    there = {"kind": "megatron", "prefix": "s3://data/pretrain/tokens"}
    from_s3 = build(tmp_path / "cache", there)
    assert sequence(from_s3) == sequence(local)
    assert build(tmp_path / "cache", there).fingerprint == from_s3.fingerprint
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert files
    for canary in (SECRET, KEY):
        assert not [path for path in files if canary.encode() in path.read_bytes()]


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
    put: Put,
    monkeypatch: pytest.MonkeyPatch,
    train: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    texts = [f"document {number}: " + "grüße, " * (number % 50) for number in range(300)]
    turns = [
        [{"role": role, "content": text} for role in ("user", "assistant")] for text in texts
    ]
    files = {f"{number}.txt": text for number, text in enumerate(texts[:9])}
    for name, rows in {
        "part/0.jsonl": [{"text": text} for text in texts[:200]],
        "part/1.jsonl": [{"text": text} for text in texts[200:]],
        "chats.jsonl": [{"messages": one} for one in turns],
    }.items():
        files[name] = "".join(json.dumps(row) + "\n" for row in rows)
    for name, content in files.items():
        path = tmp_path / "web" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        put(path, f"web/{name}")

    def at(place: str) -> dict[str, Any]:
        return dict(json.loads(json.dumps(train).replace("{}", place)))

    local = build(tmp_path / "local", at(str(tmp_path / "web")), **settings)
    from_s3 = build(tmp_path / "cache", at("s3://data/web"), **settings)
    assert sequence(from_s3) == sequence(local)
    assert from_s3.fingerprint == local.fingerprint, "the same contents, wherever they lie"
    monkeypatch.setattr(RemoteFile, "open", lambda *_: pytest.fail("it is read again"))
    build(tmp_path / "cache", at("s3://data/web"), **settings)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("s3://data/tokens/none", "there is no file s3://data/tokens/none.idx"),
        (f"s3://{KEY}:{SECRET}@data/tokens", "data.train"),
    ],
    ids=["missing", "a login in the URL"],
)
@pytest.mark.usefixtures("put")
def test_one_error(tmp_path: Path, dmt: Dmt, prefix: str, message: str) -> None:
    """Without the secret."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(GOOD)
    train = f"data.train={json.dumps({'kind': 'megatron', 'prefix': prefix})}"
    printed = dmt("data", "prepare", recipe, "--set", train, code=2)
    assert message in printed.err and "Traceback" not in printed.err
    assert SECRET not in printed.out + printed.err
