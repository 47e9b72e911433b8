"""Documents in MDS shards: a folder with `index.json` and files `shard.*.mds`.

    index.json  of every shard: names, sizes and hashes of its files, documents, columns
    a shard     uint32 documents, uint32[documents + 1] places where they begin and the last one
                ends, the columns as JSON, the documents
    a document  uint32 size of each column without a fixed one, then the values; little-endian

The format is that of mosaicml-streaming (https://docs.mosaicml.com/projects/streaming). Only
the column of text is decoded; the others are skipped, so nothing is executed.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import xxhash
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError

from toolkit.data.dropped import DroppedRows
from toolkit.data.files import read_blocks, read_bytes
from toolkit.data.json_rows import opener_of, undecodable
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource

MDS_INDEX = "index.json"
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


def is_mds(folder: Path) -> bool:
    """Whether a folder holds MDS shards, or their index."""
    index = folder / MDS_INDEX
    beginning = next(read_blocks(index), b"") if index.is_file() else b""
    return is_mds_index(beginning) or (folder.is_dir() and any(folder.glob("*.mds*")))


def is_mds_index(beginning: bytes) -> bool:
    """Whether a file that begins so is an index of MDS shards."""
    return b'"shards"' in beginning and b'"mds"' in beginning


def read_mds(folder: Path) -> list[tuple[Path, MdsShard]]:
    """The shards in the order of the index, each with its file; none of them is read.

    Raises DataError where the index is wrong, a file is missing or has another size, or a
    column holds code.
    """

    def size(name: str) -> int | None:
        path = folder / name
        return path.stat().st_size if path.is_file() else None

    shards = shards_of(str(folder), read_bytes(folder / MDS_INDEX), size)
    return [(folder / name, shard) for name, shard in shards]


def shards_of(
    folder: str, index: bytes, size: Callable[[str], int | None]
) -> list[tuple[str, MdsShard]]:
    """As `read_mds`, with the name of each file in `folder`, which is what messages say; `size`
    gives that of such a name, None where there is no file."""
    try:
        shards = _MdsIndex.model_validate_json(index).shards
    except ValidationError as error:
        first = error.errors()[0]
        said = f"{'.'.join(map(str, first['loc'])) or 'all'}: {first['msg']}"
        place = f"{folder}/{MDS_INDEX}"
        raise _damaged(place, f"it is no index of MDS shards ({said})") from error
    return [(_file_of(shard, folder, size), shard) for shard in shards]


def _file_of(shard: MdsShard, folder: str, size: Callable[[str], int | None]) -> str:
    index, name = f"{folder}/{MDS_INDEX}", shard.raw_data.basename
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
        if (found := size(file.basename)) is not None:
            _check_size(f"{folder}/{file.basename}", found, file)
            return file.basename
    raise _damaged(f"{folder}/{name}", f"it is missing, and {MDS_INDEX} names it")


def columns_of(shards: Iterable[tuple[Path, MdsShard]]) -> dict[str, str]:
    """What the columns that all shards share hold, as `check_column` names it."""
    first, *others = [shard.columns for _, shard in shards] or [{}]
    shared = [one for one in first.items() if all(one in other.items() for other in others)]
    return {name: "text" if kind == "str" else kind for name, kind in shared}


@dataclass(frozen=True)
class MdsDocuments:
    """One document per row, in the order of the index; a shard at a time is in memory."""

    source: HfSource
    shards: Sequence[tuple[Path, MdsShard]]
    fingerprint: str

    def __len__(self) -> int:
        return sum(shard.samples for _, shard in self.shards)

    def __iter__(self) -> Iterator[str]:
        dropped = DroppedRows(self.source)
        for path, shard in self.shards:
            yield from texts_of(str(path), read_bytes(path), shard, self.source, dropped)
        dropped.report()

    def in_parts(self) -> Iterator[Iterable[str]]:
        """See `Documents.in_parts`: a row is one part."""
        return ((text,) for text in self)


def texts_of(
    path: str, content: bytes, shard: MdsShard, source: HfSource, dropped: DroppedRows
) -> Iterator[str]:
    """The texts of a shard, whose file has this content."""
    column = source.text_field
    for number, text in enumerate(_values(path, content, shard, column), start=1):
        try:
            yield text.decode()
        except UnicodeDecodeError:
            dropped.add(f"{path}, document {number:,}: `{column}` is not UTF-8")


def _values(path: str, content: bytes, shard: MdsShard, column: str) -> Iterator[bytes]:
    """A column of a shard. Raises DataError where the shard is not what the index says."""
    content, count = _plain(path, content, shard), shard.samples
    table = 4 * (count + 2)
    if (found := int.from_bytes(content[:4], "little")) != count or len(content) < table:
        raise _damaged(path, f"it holds {found:,} documents, {MDS_INDEX} says {count:,}")
    places = struct.unpack(f"<{count + 1}I", content[4:table])
    if places[0] < table or places[-1] != len(content):
        raise _damaged(path, "its table of documents is wrong")
    try:
        columns = MdsColumns.model_validate_json(content[table : places[0]])
    except ValidationError:
        columns = None
    if columns is None or not vars(columns).items() <= vars(shard).items():
        raise _damaged(path, f"its own columns are not those in {MDS_INDEX}")
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
            raise _damaged(path, f"{MDS_INDEX} has a hash `{name}` of it, which is unknown")
        if found != expected:
            raise _damaged(path, f"its {name} is {found}, {MDS_INDEX} says {expected}")


def _check_size(path: str, size: int, stated: MdsFile) -> None:
    if size != stated.bytes:
        how = "" if path.endswith(stated.basename) else " when decompressed"
        raise _damaged(path, f"it has {size:,} bytes{how}, {MDS_INDEX} says {stated.bytes:,}")


def _damaged(path: str, why: str) -> DataError:
    return DataError(f"cannot read {path}: {why}", fix="copy or write the shards again")
