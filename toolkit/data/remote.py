"""Files at URLs that fsspec reads (`s3://`, `gs://`, `hf://` …): listed, read and copied.

Credentials and endpoints come from where the store's own library takes them (environment,
profile, machine), never from a recipe. It also tries failed requests again.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from toolkit.data.files import cache_not_writable, fingerprint_of, held_lock
from toolkit.data.progress import Track
from toolkit.errors import BackendUnavailable, DataError, DmtError
from toolkit.text.redact import redact

PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
    "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp",
}  # fmt: skip
"""The package that reads a URL, by its scheme."""
_CONTENT = ("md5Hash", "content_md5", "sha256", "blob_id", "ETag", "etag", "generation")
"""Fields that change with the contents alone. A store's listings and single look-ups agree on
them. On others they do not (fsspec's `ukey` hashes all of them)."""
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
_BLOCK_BYTES = 2**23


@dataclass(frozen=True)
class RemoteFile:
    """A file as it was listed."""

    url: str
    size: int
    identity: str
    """Hex. Changes with the contents. The same contents elsewhere have the same one where the
    store reports a checksum of them."""

    def __str__(self) -> str:
        """The file's name in messages."""
        return shown(self.url)

    @contextmanager
    def open(self, mode: Literal["rb"]) -> Iterator[Any]:
        """The bytes, which are read ahead. Raises DataError where they cannot be read."""
        with _reading(self.url):
            system, path = _found(self.url)
            with system.open(path, mode, block_size=_BLOCK_BYTES) as stream:
                yield stream


DataFile: TypeAlias = Path | RemoteFile
"""A file that data is read from."""


def list_files(pattern: str) -> list[RemoteFile]:
    """The files that match a glob, sorted by path. Empty where there are none.

    Raises DataError where the store cannot be reached or refuses, BackendUnavailable where the
    package for it is missing.
    """
    with _reading(pattern):
        system, path = _found(pattern)
        system.invalidate_cache()
        found = system.glob(_pinned(system, path), detail=True)
        return [
            RemoteFile(system.unstrip_protocol(name), int(info["size"]), _identity(info))
            for name, info in sorted(found.items())
            if info["type"] == "file"
        ]


def copied(files: Sequence[RemoteFile], folder: Path, track: Track) -> None:
    """Copy the files into `folder`, those that are not in it. One process at a time does.

    A copy gets its name when it is complete. Raises DataError where a file cannot be read or
    has changed since it was listed, or the copy cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held_lock(folder / "copying.lock", "copying"):
            for file in track(files, "copying remote files"):
                copy = folder / PurePosixPath(file.url).name
                if not copy.exists():
                    _copy(file, copy)
    except OSError as error:
        raise cache_not_writable(folder, error) from error


def _copy(file: RemoteFile, copy: Path) -> None:
    unfinished = copy.with_name(copy.name + ".tmp")
    with unfinished.open("wb") as stream, file.open("rb") as source:
        shutil.copyfileobj(source, stream, _BLOCK_BYTES)
        stream.flush()
        os.fsync(stream.fileno())
    if unfinished.stat().st_size != file.size:
        raise DataError(
            f"{file} has changed since it was listed",
            fix="write new data to a new path, and start again",
        )
    unfinished.replace(copy)


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
    """A path or URL as messages name it: without a login, and without a signature in the query
    of a URL."""
    without = url.partition("?")[0] if urlsplit(url).scheme in ("http", "https") else url
    return redact(without)


def _found(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    check_package(url)
    system, path = url_to_fs(url)
    return system, path


def _pinned(system: Any, path: str) -> str:
    """The path with the commit of a hub's branch, which may move. Unchanged for other
    stores."""
    if "hf" not in system.protocol:
        return path
    found = system.resolve_path(path)
    if not hasattr(found, "repo_id"):
        return path
    commit = system._api.repo_info(
        found.repo_id, repo_type=found.repo_type, revision=found.revision
    ).sha
    return str(replace(found, revision=commit, _raw_revision=None).unresolve())


def _identity(info: Mapping[str, Any]) -> str:
    """The store's checksum of the contents, otherwise their time."""
    for field in _CONTENT:
        if info.get(field):
            return fingerprint_of([info["size"], field, str(info[field])])
    times = [info[field] for field in _TIMES if info.get(field)]
    # Listings of memory:// have seconds where single look-ups have a datetime.
    changed = [t.timestamp() if isinstance(t, datetime) else t for t in times[:1]]
    return fingerprint_of([info["size"], info["name"], *map(str, changed)])


@contextmanager
def _reading(url: str) -> Iterator[None]:
    """Raise DataError for whatever a store's library raises."""
    try:
        yield
    except DmtError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no {shown(url)}", fix="correct the path") from error
    except Exception as error:  # noqa: BLE001 - what it is depends on the library
        lines = str(error).splitlines() or [""]
        said = redact(f"{type(error).__name__}: {lines[0]}")
        raise DataError(
            f"cannot read {shown(url)}: {said}",
            fix="check the path, the network, and the login in the environment or profile of "
            "the library",
        ) from None
