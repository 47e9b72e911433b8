"""Sources of documents: text files, and everything that the `datasets` library reads."""

import codecs
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from toolkit.data.dropped import DroppedRows
from toolkit.data.files import (
    content_fingerprint,
    find_files,
    fingerprint_of,
    matching_paths,
    read_blocks,
    read_bytes,
)
from toolkit.data.json_rows import (
    check_bounds,
    count_rows,
    first_wrong_text,
    is_json,
    json_rows,
    wrong_text,
)
from toolkit.data.mds import MDS_INDEX, MdsDocuments, columns_of, is_mds, read_mds
from toolkit.data.progress import Track, untracked
from toolkit.data.remote.copies import with_copies
from toolkit.data.saved import SAVED, of_split, saved_files
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import HfSource, RowsSource, TextSource

logger = logging.getLogger(__name__)

_BUILDERS = {
    ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".txt": "text",
}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_COMMIT_LENGTH = 40
_ROWS_AT_ONCE = 1000
CORRECT = "correct it, or leave it out of the data"
_OF_FILES = re.compile(r"(train|all)\b")
"""Splits of files that are named one by one: `datasets` calls all of their rows `train`."""
TEXT = "text"
_MIXED = "extension<arrow.json>"
"""How `datasets` keeps a column of JSON files that holds several kinds of values."""
MESSAGES = "lists of messages"
_MESSAGE = re.compile(r"struct<.*\b(content|value): ")
"""A message in the name of an Arrow type: chats are lists of role and content, or from and
value."""


class Documents(Protocol):
    """The documents of a source, read one by one."""

    @property
    def fingerprint(self) -> str:
        """Changes with the contents; stays the same when files are only moved."""
        ...

    def __len__(self) -> int:
        """Number of documents, empty ones included."""
        ...

    def __iter__(self) -> Iterator[str]:
        """Texts in a fixed order; a document without text is the empty string."""
        ...

    def in_parts(self) -> Iterator[Iterable[str]]:
        """The same texts, each in parts, so that a large file is never completely in memory."""
        ...


def open_source(
    source: TextSource | HfSource, *, base: Path, cache: Path, track: Track = untracked
) -> Documents:
    """Find the documents of `source`; relative paths start at `base`.

    `cache` is the folder that remembers the hashes of files, and holds copies of remote ones.
    Raises DataError when there are none, BackendUnavailable when `datasets` is missing.
    """
    source = with_copies(source, cache, track)
    if isinstance(source, TextSource):
        texts = find_files(source.files, base, source.exclude)
        return TextDocuments(tuple(texts), content_fingerprint(texts, cache))
    if (files := local_files(source, base)) is not None:
        contents = content_fingerprint(files, cache)
        parts = ["hf", contents, source.name, source.split, source.text_field]
        if source.malformed == "drop":
            parts.append(f"at most {source.malformed_limit} dropped")
        if is_mds(folder := _local_path(source, base)):
            shards = read_mds(folder)
            check_column(source, columns_of(shards))
            return MdsDocuments(source, shards, fingerprint_of(parts))
        return HfDocuments(source, base, tuple(files), fingerprint_of(parts))
    return _hub_documents(source, base)


@dataclass(frozen=True)
class TextDocuments:
    """One document per file. Bytes that are not UTF-8 become U+FFFD, reported once."""

    files: tuple[Path, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.files)

    def __iter__(self) -> Iterator[str]:
        return map("".join, self.in_parts())

    def in_parts(self) -> Iterator[Iterable[str]]:
        """See `Documents.in_parts`."""
        not_utf8: list[Path] = []
        for path in self.files:
            yield decoded(read_blocks(path), partial(not_utf8.append, path))
        if not_utf8:
            logger.warning(
                "%d of %d files are not UTF-8; their undecodable bytes were replaced by U+FFFD "
                "(the first is %s)",
                len(not_utf8),
                len(self.files),
                not_utf8[0],
            )


def decoded(blocks: Iterable[bytes], not_utf8: Callable[[], object]) -> Iterator[str]:
    """The text of a file, block by block; calls `not_utf8` where that is not what it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in chain(blocks, [b""]):
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError:
            not_utf8()
            decoder.errors = "replace"
            yield decoder.decode(block, final=not block)


@dataclass(frozen=True)
class HfDocuments:
    """One document per row, from the column `text_field`."""

    source: HfSource
    base: Path
    files: tuple[Path, ...]
    """Local files; none for a hub id."""
    fingerprint: str

    @cached_property
    def _dataset(self) -> Any:
        dataset = load_rows(self.source, self.base, self.files)
        kinds = arrow_kinds(dataset.features.arrow_schema)
        if kinds.get(self.source.text_field) == _MIXED:
            _look_for_wrong_text(self.source, self.files)
        check_column(self.source, kinds)
        return dataset

    @property
    def _row_by_row(self) -> bool:
        return names_json(self.source, self.base, self.files)

    def __len__(self) -> int:
        if self._row_by_row:
            return count_rows(self.files, self.source.row_limit_mib)
        return len(self._dataset)

    def __iter__(self) -> Iterator[str]:
        dropped = DroppedRows(self.source)
        yield from self._json(dropped) if self._row_by_row else self._arrow(dropped)
        dropped.report()

    def _json(self, dropped: DroppedRows) -> Iterator[str]:
        column = self.source.text_field
        columns: dict[str, str] = {}
        limit = self.source.row_limit_mib
        for place, row in chain.from_iterable(json_rows(file, limit) for file in self.files):
            if (why := wrong_text(row, column)) is not None:
                dropped.add(f"{place}: {why}")
                continue
            assert isinstance(row, dict), "anything else is wrong"
            if columns.get(column) != TEXT:
                add_kinds(columns, row)
            yield row.get(column) or ""
        if not columns and not dropped.count:
            raise DataError(f"`{self.source.path}` has no rows", fix=CORRECT)
        check_column(self.source, columns)

    def _arrow(self, dropped: DroppedRows) -> Iterator[str]:
        column = self.source.text_field
        dataset, number = self._dataset.select_columns([column]).with_format("arrow"), 0
        for table in dataset.iter(batch_size=_ROWS_AT_ONCE):
            try:
                yield from (text or "" for text in table.column(0).to_pylist())
            except UnicodeDecodeError:
                _look_for_wrong_text(self.source, self.files)
                for at, text in enumerate(table.column(0), number + 1):
                    try:
                        yield text.as_py() or ""
                    except UnicodeDecodeError:
                        place = f"`{self.source.path}`, row {at:,}"
                        dropped.add(f"{place}: `{column}` is not UTF-8")
            number += len(table)

    def in_parts(self) -> Iterator[Iterable[str]]:
        """See `Documents.in_parts`: a row is one part."""
        return ((text,) for text in self)


def _hub_documents(source: HfSource, base: Path) -> HfDocuments:
    """Documents of a hub id."""
    parts = ["hub", source.path, source.name, source.split, source.text_field]
    version = hub_version(source, base)
    return HfDocuments(source, base, (), fingerprint_of([*parts, version]))


def hub_version(source: RowsSource, base: Path) -> str:
    """What identifies the rows of a hub id. A full commit hash needs no look at the hub."""
    revision = source.revision or ""
    if len(revision) == _COMMIT_LENGTH and set(revision) <= set("0123456789abcdef"):
        return revision
    return str(load_rows(source, base, ())._fingerprint)


def names_json(source: RowsSource, base: Path, files: Sequence[Path]) -> bool:
    """Whether all files are JSON, and all of their rows are wanted.

    In a folder, `datasets` finds by the files' names which split they belong to.
    """
    if not files or source.split != "train" or _local_path(source, base).is_dir():
        return False
    return all(is_json(file) for file in files)


def builder_of(path: Path) -> str | None:
    """Name of the `datasets` builder for a file, from its ending."""
    stem = path.with_suffix("") if path.suffix in _COMPRESSED else path
    return _BUILDERS.get(stem.suffix)


def local_files(source: RowsSource, base: Path) -> list[Path] | None:
    """Data files that `path` names, sorted; None when it is a hub id or a URL.

    A local folder wins over a hub id of the same name, as in `datasets`.
    """
    files = _local_files(source, base)
    if files is None:
        return None
    if source.revision is not None:
        raise DataError(
            f"`revision: {source.revision}` is given, but `{source.path}` is a local path",
            fix="remove `revision`; it chooses a version of a hub dataset",
        )
    path = _local_path(source, base)
    if is_mds(path):
        wanted = {"kind": "hf", "split": "train", "name": None}
        for key in (key for key, value in wanted.items() if getattr(source, key) != value):
            raise DataError(
                f"`{key}: {getattr(source, key)}` is given for MDS shards (`{source.path}`)",
                fix="read them with `kind: hf`, without `split` and `name`",
            )
    elif not path.is_dir() and not _OF_FILES.match(source.split):
        raise DataError(
            f"`split: {source.split}` is given, but the rows of `{source.path}` are `train`",
            fix="write `split: train` next to `path`; folders and hub ids have other splits",
        )
    return files


def _local_files(source: RowsSource, base: Path) -> list[Path] | None:
    if is_remote(source.path):
        return None
    path = _local_path(source, base)
    if is_mds(path):
        return [path / MDS_INDEX, *(file for file, _ in read_mds(path))]
    if path.is_dir():
        files = [file for file in matching_paths("**/*", path) if builder_of(file)]
        if saved := _is_saved(path):
            saved_files(source, partial(_content, path))
            files = [file for file in files if file.suffix == ".arrow"]
        if not files:
            raise DataError(
                f"the folder {path} holds no {', '.join(_BUILDERS)} file",
                fix="name the folder that holds the data files",
            )
        # The card may say which file belongs to which split.
        card = path / "README.md"
        return [*files, card] if card.is_file() and not saved else files
    looks_local = (
        path.exists()
        or builder_of(Path(source.path)) is not None
        or source.path.startswith((".", "/", "~"))
        or any(sign in source.path for sign in "*?[")
    )
    return find_files([source.path], base) if looks_local else None


def _local_path(source: RowsSource, base: Path) -> Path:
    return base / Path(source.path).expanduser()


def load_rows(source: RowsSource, base: Path, files: tuple[Path, ...]) -> Any:
    """The rows of the split, memory-mapped by `datasets`.

    Raises DataError where it cannot read them; of documents, it names the row of a JSON file
    that has no text.
    """
    datasets = _datasets(source)
    zipped = any(file.suffix == ".zst" for file in files)
    if zipped and not datasets.config.ZSTANDARD_AVAILABLE:
        raise BackendUnavailable(
            f"`{source.path}` names .zst files, which needs the package `zstandard`",
            fix="pip install zstandard",
        )
    arguments = _load_arguments(source, base, files)
    try:
        for file in (one for one in files if builder_of(one) in ("json", "text")):
            check_bounds(file, source.row_limit_mib)
        if _is_saved(path := _local_path(source, base)):
            part, _ = saved_files(source, partial(_content, path))
            return datasets.load_from_disk(str(path / part))
        return datasets.load_dataset(**arguments, split=source.split)
    except DataError:
        raise
    except Exception as error:  # what its readers raise depends on the file's kind
        _look_for_unreadable_parquet(files)
        if isinstance(source, HfSource):
            _look_for_wrong_text(source, files)
        raise _cannot_load(source, files, error) from error


def _datasets(source: RowsSource) -> Any:
    """The package, without its own output. Raises BackendUnavailable without it."""
    try:
        import datasets
    except ImportError as error:
        raise BackendUnavailable(
            f"data of `kind: {source.kind}` needs the package `datasets`",
            fix="pip install datasets",
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # What its readers log as an error they raise as well.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    return datasets


def data_files_of(source: RowsSource, folder: Path | None) -> list[str]:
    """Paths or URLs of the files of the split: of a local folder, else of the hub id.

    Raises DataError where `datasets` finds none, or would read parts of them.
    """
    where = source.path if folder is None else str(folder)
    try:
        builder = _datasets(source).load_dataset_builder(
            where, name=source.name, revision=source.revision
        )
    except BackendUnavailable:
        raise
    except Exception as error:  # what it raises depends on the file's kind
        raise _cannot_load(source, (), error) from error
    for setting, default in (("field", None), ("sample_by", "line"), ("filters", None)):
        if (found := getattr(builder.config, setting, default)) != default:
            raise DataError(
                f"`{source.path}` has `{setting}: {found}` in its card, which is not streamed",
                fix="remove `data.streaming`",
            )
    return [str(file) for file in of_split(source, builder.config.data_files or {})]


def _look_for_wrong_text(source: HfSource, files: tuple[Path, ...]) -> None:
    """Raise DataError for the first row of JSON files that is not as it must be."""
    if wrong := first_wrong_text(files, source.text_field, source.row_limit_mib):
        raise DataError(wrong, fix=CORRECT)


def _look_for_unreadable_parquet(files: tuple[Path, ...]) -> None:
    """Raise DataError for the first Parquet file that is damaged, or empty."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    for file in files:
        if file.suffix == ".parquet":
            try:
                rows = read_metadata(file).num_rows
            except (ArrowException, OSError) as error:
                raise DataError(f"cannot read {file}: {error}", fix=CORRECT) from error
            if not rows:
                raise DataError(f"{file} has no rows", fix="leave the file out")


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SAVED)


def _content(folder: Path, name: str) -> bytes:
    return read_bytes(folder / name) if (folder / name).is_file() else b""


def _load_arguments(source: RowsSource, base: Path, files: tuple[Path, ...]) -> dict[str, Any]:
    if not files:
        return {"path": source.path, "name": source.name, "revision": source.revision}
    path = _local_path(source, base)
    if path.is_dir():
        return {"path": str(path), "name": source.name}
    builders = {builder_of(file) for file in files}
    builder = builders.pop()
    if builders or builder is None:
        raise DataError(
            f"`{source.path}` names files of different or unknown kinds, e.g. {files[0].name}",
            fix="name files of one kind: .json or .jsonl, .parquet, .arrow, .txt; MDS shards "
            "by their folder",
        )
    names = [str(file) for file in files]
    return {"path": builder, "name": source.name, "data_files": {"train": names}}


def _cannot_load(source: RowsSource, files: tuple[Path, ...], error: Exception) -> DataError:
    reason = str(error.__cause__ or error) or type(error).__name__
    if files and not any(file.stat().st_size for file in files):
        reason = "it is empty"
    if files:
        fix = "check the file's format, and `split`: single files have the split `train`"
    else:
        fix = (
            "check the hub id, `name` and `split`; without network, give a local file or "
            "folder, or download the dataset once while online"
        )
    return DataError(f"cannot load `{source.path}`, split `{source.split}`: {reason}", fix=fix)


def arrow_kinds(schema: Any) -> dict[str, str]:
    """What each column of a `pyarrow.Schema` holds, as `check_column` names it."""
    kinds = {}
    for field in schema:
        kind = str(field.type)
        if kind in ("string", "large_string"):
            kind = TEXT
        elif kind.startswith(("list<", "large_list<")) and _MESSAGE.search(kind):
            kind = MESSAGES
        kinds[field.name] = kind
    return kinds


def add_kinds(columns: dict[str, str], row: Mapping[str, object]) -> None:
    """Add to `columns` what those of a JSON row hold, where that is not known yet."""
    for name, value in row.items():
        if columns.get(name, "null") == "null":
            columns[name] = _json_kind(value)


def _json_kind(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return MESSAGES if {"content", "value"} & value[0].keys() else "lists"
    kinds = {str: TEXT, type(None): "null", bool: "booleans", list: "lists", dict: "maps"}
    return kinds.get(type(value), "numbers")


def check_column(source: HfSource, columns: Mapping[str, str]) -> None:
    """Raise DataError unless the column `text_field` is there and holds text.

    `columns` says what each column holds: TEXT, MESSAGES, `null` where nothing is known.
    """
    kind = columns.get(source.text_field)
    if kind in (TEXT, "null"):
        return
    texts = [name for name, held in columns.items() if held == TEXT]
    fix = "set `text_field` to the column that holds the text"
    if texts:
        fix = f"set `text_field` to a column of text, of {', '.join(texts)}"
    if kind is None:
        found = f"`{source.path}` has no column `{source.text_field}`; its columns are "
        found += ", ".join(columns) or "none"
        chats = [name for name, held in columns.items() if held == MESSAGES]
    else:
        found = f"column `{source.text_field}` of `{source.path}` holds {kind}, not text"
        chats = [source.text_field] if kind == MESSAGES else []
    if chats:
        found += f"; `{chats[0]}` holds chats"
        fix = (
            "write `kind: chat` (or `kind: preference`) instead of `kind: hf`, see docs/chat.md"
        )
    raise DataError(found, fix=fix)
