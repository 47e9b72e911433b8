"""Remote files: listed with an identity, read in ranges, tried again, clear errors."""

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from toolkit.data.remote import store as remote
from toolkit.data.remote.store import RETRIES, check_package, list_files, read_range, shown
from toolkit.errors import BackendUnavailable, DataError


@pytest.fixture
def store() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


def test_files_of_a_glob(store: Any) -> None:
    for name in ("a/2.txt", "a/10.txt", "a/1.md", "a/deep/3.txt"):
        store.pipe(f"/{name}", name.encode())
    found = list_files("memory://a/*.txt")
    assert [(file.url, file.size) for file in found] == [
        ("memory:///a/10.txt", 8),
        ("memory:///a/2.txt", 7),
    ]
    assert len(list_files("memory://a/**/*.txt")) == 3
    assert [file.url for file in list_files("memory://a/1.md")] == ["memory:///a/1.md"]
    assert list_files("memory://a/*.json") == list_files("memory://none/x") == []


def test_ranges(store: Any) -> None:
    store.pipe("/a", b"0123456789")
    (file,) = list_files("memory://a")
    assert read_range(file, 3, 7) == b"3456"
    assert read_range(file, 0, 10) == b"0123456789"
    assert read_range(file, 4, 4) == b""
    with pytest.raises(ValueError, match="of 10"):
        read_range(file, 3, 11)


def test_the_identity_is_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    (first,) = list_files(f"file://{path}")
    assert list_files(f"file://{path}") == [first]
    path.write_text("two")
    os.utime(path, (1, 1))
    (second,) = list_files(f"file://{path}")
    assert second.identity != first.identity
    with pytest.raises(DataError, match="has changed since it was listed"):
        read_range(first, 0, 3)


class Failing:
    """Opens files like a store, after some failures."""

    def __init__(self, store: Any, failures: list[Exception | str]) -> None:
        self._open, self.failures = store.open, failures

    def __call__(self, path: str, *args: Any, **settings: Any) -> Any:
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        stream = self._open(path, *args, **settings)
        return _Cut(stream) if failure == "cut" else stream


class _Cut:
    """A stream that ends early."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> "_Cut":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def seek(self, place: int) -> None:
        self.stream.seek(place)

    def read(self, size: int) -> bytes:
        return bytes(self.stream.read(size))[:-1]


@pytest.fixture
def failing(store: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., remote.RemoteFile]:
    def fail(*failures: Exception | str) -> remote.RemoteFile:
        store.pipe("/a", b"0123456789")
        (file,) = list_files("memory://a")
        system = remote._opened(file.url)[0]
        monkeypatch.setattr(system, "open", Failing(system, list(failures)))
        return file

    return fail


def test_what_may_pass_is_tried_again(
    failing: Callable[..., remote.RemoteFile],
    pauses: list[float],
) -> None:
    before = RETRIES.count
    reset = OSError(errno.EIO, "internal error")
    file = failing(TimeoutError("slow"), "cut", reset, ConnectionResetError("gone"), "cut")
    assert read_range(file, 2, 5) == b"234"
    assert RETRIES.count == before + 5
    parts = [pause / 0.25 / 2**n for n, pause in enumerate(pauses)]
    assert all(0.5 <= part <= 1 for part in parts)
    assert len(set(parts)) == 5, "no two processes are to try at the same time"


def test_it_gives_up(failing: Callable[..., remote.RemoteFile], pauses: list[float]) -> None:
    file = failing(*[TimeoutError("slow")] * 99)
    with pytest.raises(DataError, match=r"memory:///a, tried 9 times: TimeoutError: slow"):
        read_range(file, 0, 1)
    assert 30 < sum(pauses) < 70


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (FileNotFoundError("a"), "there is no memory:///a"),
        (PermissionError("Forbidden"), "PermissionError: Forbidden"),
        (OSError(errno.EINVAL, "bad region"), "bad region"),
        (type("NoCredentialsError", (Exception,), {"__module__": "botocore"})("x"), "NoCred"),
    ],
)
def test_what_stays_wrong_is_not(
    failing: Callable[..., remote.RemoteFile],
    pauses: list[float],
    failure: Exception,
    message: str,
) -> None:
    file = failing(failure)
    with pytest.raises(DataError, match=message) as raised:
        read_range(file, 0, 1)
    assert raised.value.fix
    assert not pauses


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


def test_logins_are_not_shown() -> None:
    assert shown("s3://key:canary-secret@bucket/a") == "s3://***@bucket/a"
    signed = "https://host/a.bin?X-Amz-Credential=canary&X-Amz-Signature=canary"
    assert shown(signed) == "https://host/a.bin"
    assert shown("s3://bucket/part-?.jsonl") == "s3://bucket/part-?.jsonl"
