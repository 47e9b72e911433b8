"""Remote files: listed with an identity, copied once, clear errors."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import pytest
from huggingface_hub import HfApi, HfFileSystem

from toolkit.data.progress import untracked
from toolkit.data.remote import check_package, copied, list_files, shown
from toolkit.errors import BackendUnavailable, DataError


@pytest.fixture
def store() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


def test_the_identity_is_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    (first,) = list_files(f"file://{path}")
    assert list_files(f"file://{path}") == [first]
    path.write_text("two")
    os.utime(path, (1, 1))
    (second,) = list_files(f"file://{path}")
    assert second.identity != first.identity


def test_copies_are_whole(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once; of a copy that was broken off, or of another file, none is left."""
    content = random.Random(1).randbytes(20 * 2**20)
    store.pipe("/a/large", content)
    (file,) = list_files("memory://a/*")
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr("os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        copied([file], tmp_path, untracked)
    assert not (tmp_path / "large").exists()
    copied([file], tmp_path, untracked)
    assert (tmp_path / "large").read_bytes() == content
    store.rm("/a/large")
    copied([file], tmp_path, untracked)
    with pytest.raises(DataError, match="there is no memory:///a/large"):
        copied([file], tmp_path / "other", untracked)
    store.pipe("/a/large", content[1:])
    with pytest.raises(DataError, match="a/large has changed since it was listed"):
        copied([file], tmp_path / "other", untracked)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (PermissionError("Forbidden"), "PermissionError: Forbidden"),
        (type("NoCredentialsError", (Exception,), {"__module__": "botocore"})("x"), "NoCred"),
    ],
)
def test_what_a_store_refuses(
    store: Any, monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str
) -> None:
    store.pipe("/a", b"0123456789")
    (file,) = list_files("memory://a")
    monkeypatch.setattr(store, "open", Mock(side_effect=failure))
    with pytest.raises(DataError, match=message) as raised, file.open("rb"):
        pass
    assert raised.value.fix


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(protocol: str) -> None:
        raise ImportError(f"Install the package of {protocol}")

    check_package("memory://a")
    with pytest.raises(DataError, match="nothing reads `s4://`"):
        check_package("s4://bucket/a")
    with pytest.raises(DataError, match="a chain of URLs"):
        check_package("zip://a.txt::s3://bucket/a.zip")
    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    for url, package in (("s3://b/a", "s3fs"), ("gs://b/a", "gcsfs"), ("abfs://b/a", "adlfs")):
        with pytest.raises(BackendUnavailable) as raised:
            list_files(url)
        assert raised.value.fix == f"pip install {package}"


def test_a_branch_of_a_hub_is_read_at_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it becomes later is other data."""
    commit, asked = "0123456789" * 4, list[str]()
    monkeypatch.setattr(HfApi, "dataset_info", lambda *_, **__: Mock(sha=commit))
    monkeypatch.setattr(HfFileSystem, "glob", lambda _, path, **__: asked.append(path) or {})
    for branch in ("", "@main"):
        list_files(f"hf://datasets/org/texts{branch}/data/*.parquet")
    assert asked == [f"datasets/org/texts@{commit}/data/*.parquet"] * 2


def test_logins_are_not_shown() -> None:
    assert shown("s3://key:canary-secret@bucket/a") == "s3://***@bucket/a"
    signed = "https://host/a.bin?X-Amz-Credential=canary&X-Amz-Signature=canary"
    assert shown(signed) == "https://host/a.bin"
    assert shown("s3://bucket/part-?.jsonl") == "s3://bucket/part-?.jsonl"
