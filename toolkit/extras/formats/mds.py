"""Documents in MDS shards: a folder with `index.json` and files `shard.*.mds`.

    index.json  of every shard: names, sizes and hashes of its files, documents, columns
    a shard     uint32 documents, uint32[documents + 1] places where they begin and the last one
                ends, the columns as JSON, the documents
    a document  uint32 size of each column without a fixed one, then the values; little-endian

The format is that of mosaicml-streaming (https://docs.mosaicml.com/projects/streaming). Only
the column of text is decoded; the others are skipped, so nothing is executed.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from errno import ENOENT
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import xxhash
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from toolkit.data.files import unreadable
from toolkit.data.formats.base import Format
from toolkit.data.formats.columns import TEXT, Broken, check_column
from toolkit.data.formats.compressed import opener_of, undecodable
from toolkit.data.formats.files import FileRange, ListedFile, ListedFolder
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, RowsSource

_INDEX = "index.json"
_BEGINNING = 2**20
"""Bytes of an index by which it is known."""
_ENDINGS = {"zstd": ".zst", "gz": ".gz", "bz2": ".bz2"}
"""Compressions that are read."""


class MdsFile(BaseModel):
    """A file of a shard: where it is in the folder, never outside; hashes in hex."""

    basename: Annotated[str, Field(pattern=r"^[^./][^/]*(/[^./][^/]*)*$")]
    bytes: Annotated[int, Field(ge=0, lt=2**32)]
    hashes: dict[str, str]


class MdsColumns(BaseModel):
    """What a document of a shard consists of; a size is None where each has its own."""

    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[PositiveInt | None]


class MdsShard(MdsColumns):
    """A shard, as the index has it."""

    version: Literal[2]
    format: Literal["mds"]
    compression: str | None
    raw_data: MdsFile
    zip_data: MdsFile | None
    samples: NonNegativeInt

    @property
    def columns(self) -> dict[str, str]:
        """The encoding of each column."""
        return dict(zip(self.column_names, self.column_encodings, strict=False))


class _MdsIndex(BaseModel):
    version: Literal[2]
    shards: list[MdsShard]


class Mds(Format):
    """A document of a shard; a shard at a time is in memory."""

    title = "MDS shards"
    index = (_INDEX,)

    def holds(self, folder: ListedFolder) -> bool:
        """See `Format.holds`: MDS shards, or their index."""
        if any(".mds" in name for name in folder.top):
            return True
        index = folder.read(_INDEX, _BEGINNING) if _INDEX in folder.top else b""
        return b'"shards"' in index and b'"mds"' in index

    def files(self, source: RowsSource, folder: ListedFolder) -> list[ListedFile]:
        """The shards in the order of the index; none of them is read.

        Raises DataError where the index is wrong, a file is missing or has another size, or a
        column holds code.
        """
        del source
        if _INDEX not in folder.files:
            missing = FileNotFoundError(ENOENT, os.strerror(ENOENT))
            raise unreadable(Path(folder.name) / _INDEX, missing)
        try:
            shards = _MdsIndex.model_validate_json(folder.read(_INDEX)).shards
        except ValidationError as error:
            first = error.errors()[0]
            said = f"{'.'.join(map(str, first['loc'])) or 'all'}: {first['msg']}"
            place = f"{folder.name}/{_INDEX}"
            raise _damaged(place, f"it is no index of MDS shards ({said})") from error
        return [replace(_file_of(shard, folder), format="mds", entry=shard) for shard in shards]

    def columns(self, files: Sequence[ListedFile]) -> tuple[dict[str, str], bool]:
        """See `Format.columns`: those that all shards share."""
        first, *others = [_shard(file).columns for file in files] or [{}]
        shared = [
            item for item in first.items() if all(item in other.items() for other in others)
        ]
        return {name: TEXT if kind == "str" else kind for name, kind in shared}, True

    def rows(self, source: RowsSource, part: FileRange) -> Iterator[tuple[object, object]]:
        assert isinstance(source, HfSource), "chats in MDS shards are refused"
        column, shard = source.text_field, _shard(part.file)
        check_column(source, self.columns([part.file])[0])
        try:
            with part.file.open() as stream:
                content = stream.read()
        except OSError as error:
            raise unreadable(part.file.path, error) from error
        values = _values(str(part.file), content, shard, column)
        for number, text in enumerate(values, start=1):
            try:
                row: object = {column: text.decode()}
            except UnicodeDecodeError:
                row = Broken(f"`{column}` is not UTF-8")
            yield f"{part.file}, document {number:,}", row

    def count(self, source: RowsSource, files: Iterable[ListedFile]) -> int:
        """See `Format.count`; no shard is read."""
        del source
        return sum(_shard(file).samples for file in files)


def _shard(file: ListedFile) -> MdsShard:
    assert isinstance(file.entry, MdsShard), "an index has it"
    return file.entry


def _file_of(shard: MdsShard, folder: ListedFolder) -> ListedFile:
    index, name = f"{folder.name}/{_INDEX}", shard.raw_data.basename
    lists = (shard.columns, shard.column_names, shard.column_encodings, shard.column_sizes)
    if len({*map(len, lists)}) > 1:
        raise _damaged(index, f"{name} has not one encoding and size for each column")
    for column, encoding in shard.columns.items():
        if encoding in ("pkl", "pickle"):
            raise DataError(
                f"{index}: column `{column}` of {name} holds pickles (`{encoding}`), which are "
                "code that runs when they are read",
                fix="write the shards without this column",
            )
    for file in filter(None, (shard.raw_data, shard.zip_data)):
        if (listed := folder.files.get(file.basename)) is not None:
            _check_size(f"{folder.name}/{file.basename}", listed.size, file)
            return listed
    raise _damaged(f"{folder.name}/{name}", f"it is missing, and {_INDEX} names it")


def _values(path: str, content: bytes, shard: MdsShard, column: str) -> Iterator[bytes]:
    """A column of a shard. Raises DataError where the shard is not what the index says."""
    content, count = _plain(path, content, shard), shard.samples
    table = 4 * (count + 2)
    if (found := int.from_bytes(content[:4], "little")) != count or len(content) < table:
        raise _damaged(path, f"it holds {found:,} documents, {_INDEX} says {count:,}")
    places = struct.unpack(f"<{count + 1}I", content[4:table])
    if places[0] < table or places[-1] != len(content):
        raise _damaged(path, "its table of documents is wrong")
    try:
        columns = MdsColumns.model_validate_json(content[table : places[0]])
    except ValidationError:
        columns = None
    if columns is None or not vars(columns).items() <= vars(shard).items():
        raise _damaged(path, f"its own columns are not those in {_INDEX}")
    at = shard.column_names.index(column)
    own = struct.Struct(f"<{shard.column_sizes.count(None)}I")
    for number, (start, stop) in enumerate(pairwise(places), start=1):
        given = iter(own.unpack_from(content, start) if start + own.size <= stop else ())
        sizes = [next(given, 0) if size is None else size for size in shard.column_sizes]
        if start + own.size + sum(sizes) != stop:
            raise _damaged(path, f"the sizes in document {number:,} do not add up")
        first = start + own.size + sum(sizes[:at])
        yield content[first : first + sizes[at]]


def _plain(path: str, content: bytes, shard: MdsShard) -> bytes:
    """A shard, not compressed; sizes and hashes are those of the index."""
    zipped = shard.zip_data
    if zipped is not None and path.endswith(zipped.basename):
        _check(path, content, zipped)
        ending = _ENDINGS.get(str(shard.compression).partition(":")[0], "")
        opener = opener_of(ending, path)
        if opener is None:
            found = f"{path}: its compression `{shard.compression}` is not read"
            raise DataError(found, fix="write the shards with zstd, gz, bz2, or without")
        try:
            with opener(BytesIO(content), "rb") as stream:
                content = stream.read(shard.raw_data.bytes + 1)
        except undecodable() as error:
            raise _damaged(path, str(error)) from error
    _check(path, content, shard.raw_data)
    return content


def _check(path: str, content: bytes, stated: MdsFile) -> None:
    _check_size(path, len(content), stated)
    for name, expected in stated.hashes.items():
        if name in xxhash.algorithms_available:
            found = getattr(xxhash, name)(content).hexdigest()
        elif name in hashlib.algorithms_guaranteed and not name.startswith("shake"):
            found = hashlib.new(name, content).hexdigest()
        else:
            raise _damaged(path, f"{_INDEX} has a hash `{name}` of it, which is unknown")
        if found != expected:
            raise _damaged(path, f"its {name} is {found}, {_INDEX} says {expected}")


def _check_size(path: str, size: int, stated: MdsFile) -> None:
    if size != stated.bytes:
        how = "" if path.endswith(stated.basename) else " when decompressed"
        raise _damaged(path, f"it has {size:,} bytes{how}, {_INDEX} says {stated.bytes:,}")


def _damaged(path: str, why: str) -> DataError:
    return DataError(f"cannot read {path}: {why}", fix="copy or write the shards again")


MDS = Mds()
