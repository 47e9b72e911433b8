"""Files on any path that fsspec knows (`s3://`, `gs://`, `hf://` …): listed and read in ranges.

    files = list_files("s3://bucket/web/*.jsonl")      # one listing, nothing is downloaded
    data = read_range(files[0], 0, 4096)               # one request, tried again on failures

`RemoteFile.identity` changes with the contents, as the store reports them: data derived from a
file is identified by it without reading the file. A read fails if the file has changed since it
was listed. `toolkit.data.remote.blocks.BlockCache` caches it on this machine.

A transient failure (time-outs, lost connections, 5xx, fewer bytes than requested) is retried
with exponential backoff and counted in `RETRIES`; a missing file, refused credentials or a
missing package is an error immediately. Credentials come from where the store's own library
takes them (environment, profile, machine), never from a recipe. A process that was forked may
use everything here: connections belong to the process that made them.
"""

import asyncio
import errno
import io
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar
from urllib.parse import urlsplit

from toolkit.data.files import fingerprint_of
from toolkit.errors import BackendUnavailable, DataError, DmtError
from toolkit.text.redact import redact

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_TRIES = 9
_FIRST_PAUSE_S = 0.25
"""It doubles with each try: about a minute in all, on top of the time-outs themselves."""
_READ_TIMEOUT_S = 30
_S3_CONFIG = {
    "connect_timeout": 10,
    "read_timeout": _READ_TIMEOUT_S,
    "max_pool_connections": 32,
}
"""Of botocore; seconds. What fsspec's configuration states has precedence."""
_CONTENT = ("md5Hash", "content_md5", "sha256", "blob_id", "ETag", "etag", "generation")
"""What stores report that changes with the contents alone; listings and single look-ups agree
on it, on other fields (fsspec's `ukey` hashes all of them) they do not."""
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
_FINAL = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError,
)  # fmt: skip
_FINAL_NAMES = (
    "Credential", "Token", "Login", "Profile", "Auth", "Validation", "Invalid", "FileExpired",
)  # fmt: skip
"""Parts of the names of exceptions about refused credentials or unsupported requests."""
_FINAL_CODES = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG)
PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
    "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""By the scheme of a URL."""


class Retries:
    """Counts failed reads of this process that were retried."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0
        self.told: Callable[[str], object] | None = None
        """Called with each failure, instead of counting it here, where another process does."""

    def add(self, said: str) -> None:
        """Count a failure; the first is a warning, the others are in the log."""
        if self.told is not None:
            self.told(said)
            return
        with self._lock:
            self.count += 1
            level = logging.WARNING if self.count == 1 else logging.INFO
        logger.log(level, "%s", said)


RETRIES = Retries()


@dataclass(frozen=True)
class RemoteFile:
    """A file as it was listed."""

    url: str
    size: int
    identity: str
    """Hex; changes with the contents. The same contents elsewhere have the same one where the
    store reports a checksum of them."""


def list_files(pattern: str) -> list[RemoteFile]:
    """The files that match a glob, sorted by path; empty where there are none.

    Raises DataError where the store cannot be reached or refuses, BackendUnavailable where the
    package for it is missing.
    """

    def listed() -> list[RemoteFile]:
        system, path = _opened(pattern)
        system.invalidate_cache()
        found = system.glob(_pinned(system, path), detail=True)
        return [
            RemoteFile(system.unstrip_protocol(name), int(info["size"]), _identity(info))
            for name, info in sorted(found.items())
            if info["type"] == "file"
        ]

    return _retried(pattern, listed)


def listed_url(url: str) -> str:
    """A URL in the form that `list_files` gives: of a hub's repository, with its commit."""
    system, path = _opened(url)
    return _retried(url, lambda: str(system.unstrip_protocol(_pinned(system, path))))


def read_range(file: RemoteFile, start: int, stop: int) -> bytes:
    """The bytes `start … stop - 1`. Raises DataError where they cannot be read, or the file is
    no longer the one that was listed."""
    if not 0 <= start <= stop <= file.size:
        raise ValueError(f"bytes {start} to {stop} of {file.size}")

    def read() -> bytes:
        system, path = _opened(file.url)
        with system.open(path, "rb", cache_type="none") as stream:
            info = getattr(stream, "details", None) or system.info(path)
            if int(info["size"]) != file.size or _identity(info) != file.identity:
                raise _changed(file.url)
            if file.url.startswith("hf://"):
                data = _range_of_hub(stream.url(), start, stop)
            else:
                stream.seek(start)
                data = bytes(stream.read(stop - start))
        if len(data) != stop - start:
            raise EOFError(f"{len(data):,} of {stop - start:,} bytes came")
        return data

    return _retried(file.url, read)


class RemoteStream(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stop = min(self._at + len(buffer), self._file.size)
        data = read_range(self._file, self._at, stop) if stop > self._at else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def check_package(url: str) -> None:
    """Raise where the package that reads such a URL is missing (BackendUnavailable), or there
    is none (DataError). Does not use the network."""
    import fsspec

    scheme = urlsplit(url).scheme.lower()
    if "::" in url:
        raise DataError(f"`{shown(url)}` is a chain of URLs", fix="name the files themselves")
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = PACKAGES.get(scheme, "the package that fsspec names")
        raise BackendUnavailable(
            f"`{shown(url)}` needs a package that is not installed ({error})",
            fix=f"pip install {package}",
        ) from error
    except ValueError as error:
        fix = "use a local path, or s3://, gs://, hf:// …"
        raise DataError(f"`{shown(url)}`: nothing reads `{scheme}://`", fix=fix) from error


def shown(url: str) -> str:
    """A URL as messages name it: without a login, and without a signature behind `?`."""
    without = url.partition("?")[0] if urlsplit(url).scheme in ("http", "https") else url
    return redact(without)


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    check_package(url)
    parts = urlsplit(url)
    system = _file_system(f"{parts.scheme}://{parts.netloc}", os.getpid())
    return system, system._strip_protocol(url)


@lru_cache(maxsize=64)
def _file_system(root: str, process: int) -> Any:
    """One of our own: another library's settings of its retries do not reach it."""
    from fsspec.config import conf
    from fsspec.core import url_to_fs

    del process
    options: dict[str, Any] = {}
    scheme = root.partition(":")[0]
    if scheme in ("s3", "s3a"):
        config = dict(conf.get(scheme, {}).get("config_kwargs", {}))
        # Failures are retried here, where they are counted.
        config["retries"] = {"total_max_attempts": 1}
        options["config_kwargs"] = _S3_CONFIG | config
    system = url_to_fs(root, skip_instance_cache=True, **options)[0]
    if scheme in ("s3", "s3a"):
        system.retries = 1
    return system


def _pinned(system: Any, path: str) -> str:
    """The path with the commit of a hub's branch, which may move; of other stores, as it is."""
    if "hf" not in system.protocol:
        return path
    found = system.resolve_path(path)
    if not hasattr(found, "repo_id"):
        return path
    commit = system._api.repo_info(
        found.repo_id, repo_type=found.repo_type, revision=found.revision
    ).sha
    return str(replace(found, revision=commit, _raw_revision=None).unresolve())


def _range_of_hub(url: str, start: int, stop: int) -> bytes:
    """The bytes of a file of a hub, asked for once: huggingface_hub's own file tries again
    without saying so."""
    utils: Any = import_module("huggingface_hub.utils")
    headers = {**utils.build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    answer = utils.get_session().get(url, headers=headers, timeout=_READ_TIMEOUT_S)
    utils.hf_raise_for_status(answer)
    return bytes(answer.content)


def _identity(info: Mapping[str, Any]) -> str:
    """The store's checksum of the contents, otherwise their time."""
    for field in _CONTENT:
        if info.get(field):
            return fingerprint_of([info["size"], field, str(info[field])])
    times = [info[field] for field in _TIMES if info.get(field)]
    # Listings of memory:// have seconds where single look-ups have a datetime.
    changed = [t.timestamp() if isinstance(t, datetime) else t for t in times[:1]]
    return fingerprint_of([info["size"], info["name"], *map(str, changed)])


def _changed(url: str) -> DataError:
    return DataError(
        f"{shown(url)} has changed since it was listed",
        fix="write new data to a new path, and start again",
    )


def _retried(url: str, action: Callable[[], Result]) -> Result:
    """The result of `action`, which is retried after transient failures."""
    for attempt in range(1, _TRIES + 1):
        try:
            return action()
        except DmtError:
            raise
        except Exception as error:  # noqa: BLE001 - what it is depends on the store's library
            if not _may_pass(error):
                raise _refused(url, error) from None
            if attempt == _TRIES:
                raise DataError(
                    f"cannot read {shown(url)}, tried {_TRIES} times: {_said(error)}",
                    fix="check the network and the store, and start again to continue",
                ) from None
            RETRIES.add(f"reading {shown(url)} failed and is tried again: {_said(error)}")
        time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
    raise AssertionError("the last try returns or raises")


def _may_pass(error: Exception) -> bool:
    name = type(error).__name__
    if isinstance(error, _FINAL) or any(word in name for word in _FINAL_NAMES):
        return False
    if isinstance(error, OSError | EOFError | asyncio.TimeoutError):
        return getattr(error, "errno", None) not in _FINAL_CODES
    # What the libraries of stores define themselves.
    return type(error).__module__.partition(".")[0] not in ("builtins", "toolkit")


def _refused(url: str, error: Exception) -> DataError:
    if type(error).__name__ == "FileExpired":
        return _changed(url)
    if isinstance(error, FileNotFoundError):
        return DataError(f"there is no {shown(url)}", fix="correct the path")
    return DataError(
        f"cannot read {shown(url)}: {_said(error)}",
        fix="check the path, and the login in the environment or profile of the library",
    )


def _said(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return redact(f"{type(error).__name__}: {lines[0]}")
