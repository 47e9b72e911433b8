"""The rows of a source, each with its place. Finds the files that hold them, and a reader for
each.

`toolkit.data.readers` reads files named by a path or glob, on disk or at a URL. `datasets`
reads rows of hub ids.
"""

import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

from toolkit.data.columns import check_column
from toolkit.data.listing import content_fingerprint, find_files
from toolkit.data.readers import (
    ROWS_AT_ONCE,
    ending_of,
    read_rows,
    rows_of,
)
from toolkit.data.remote import DataFile, shown
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import HfSource, RowsSource

_COMMIT = re.compile(r"[0-9a-f]{40}")
_OF_FILES = re.compile(r"(train|all)\b")
"""Splits of files: `datasets` calls all of their rows `train`."""
_STATE = "state.json"
"""A file that `save_to_disk` writes next to the files of a split. It names them."""


@dataclass(frozen=True)
class Records:
    """The rows of a source, in a fixed order, as (place, value)."""

    source: RowsSource
    files: tuple[DataFile, ...]
    """All that `data_files` names. None for a hub id."""
    version: str
    """Version of the contents: stays the same when files are only moved."""

    def __iter__(self) -> Iterator[tuple[str, object]]:
        if not self.files:
            yield from _rows_of_dataset(self.source, self._dataset)
            return
        for start, stop in self._slices:
            yield from islice(self._rows(), start, stop)

    def _rows(self) -> Iterator[tuple[str, object]]:
        return chain.from_iterable(read_rows(file, self.source) for file in self.files)

    @cached_property
    def _slices(self) -> list[tuple[int, int | None]]:
        """The rows [start, stop) of the files that `split` takes, in its order."""
        source = self.source
        names = _split_names(source)
        if "[" not in source.split:
            return [(0, None)] * len(names)
        try:
            spec = _datasets(source).ReadInstruction.from_spec(source.split)
            absolute = spec.to_absolute({names[0]: sum(1 for _ in self._rows())})
        except (AssertionError, ValueError) as error:
            raise _cannot_load(source, error) from error
        return [(part.from_, part.to) for part in absolute]

    @cached_property
    def _dataset(self) -> Any:
        return _load(self.source)


def open_records(source: RowsSource, cache: Path) -> Records:
    """Find the rows of `source`.

    `cache` is the folder with the hashes of files. Raises DataError if there are no files,
    BackendUnavailable if `datasets` is needed and missing.
    """
    files = data_files(source)
    if files is not None:
        return Records(source, tuple(files), content_fingerprint(files, cache))
    version = source.revision or ""
    if not _COMMIT.fullmatch(version):
        version = str(_load(source)._fingerprint)
    return Records(source, (), version)


# Files


def _split_names(source: RowsSource) -> list[str]:
    """The splits, all or slices of which are read, in the order of the recipe."""
    return [part.partition("[")[0] for part in source.split.split("+")]


def data_files(source: RowsSource) -> list[DataFile] | None:
    """Files that `path` names, sorted. None for a hub id.

    A local path wins over a hub id of the same name, as in `datasets`. Raises DataError where
    there is no file, for a folder, for files of several kinds, and for files beside those of
    `save_to_disk`.
    """
    path, name = Path(source.path), shown(source.path)
    looks_local = (
        is_remote(source.path)
        or path.exists()
        or ending_of(path)
        or source.path.startswith((".", "/", "~"))
        or any(sign in source.path for sign in "*?[")
    )
    if not looks_local:
        return None
    if source.revision is not None:
        raise DataError(
            f"`revision: {source.revision}` is given, but `{name}` is no hub id",
            fix="remove `revision`; it chooses a version of a hub dataset",
        )
    if path.is_dir():
        raise DataError(
            f"`{name}` is a folder",
            fix=f"name the files of a split by a glob, e.g. `{name}/train*.parquet`, or "
            "`data-*.arrow` of `save_to_disk`",
        )
    files = find_files([source.path])
    for file in files:
        _check_saved(file)
    if not _OF_FILES.match(source.split) or len({*_split_names(source)}) > 1:
        raise DataError(
            f"`split: {source.split}` is given, but the rows of `{name}` are `train`",
            fix="write `split: train`, and name the files of another split by a glob in `path`",
        )
    kinds = {ending_of(file).replace("jsonl", "json") for file in files}
    if len(kinds) > 1 or "" in kinds:
        first = PurePosixPath(str(files[0])).name
        raise DataError(
            f"`{name}` names files of different or unknown kinds, e.g. {first}",
            fix="name files of one kind: .json or .jsonl, .parquet, .arrow, .txt",
        )
    return files


def _check_saved(file: DataFile) -> None:
    """Raise DataError for a file in a folder of `save_to_disk` that is not of the data: one of
    an earlier save, or a cache of `datasets`, with the same rows."""
    if not isinstance(file, Path) or not (state := file.with_name(_STATE)).is_file():
        return
    if f'"{file.name}"' not in state.read_text("utf-8", "replace"):
        raise DataError(
            f"{file} is none of the files of {state}",
            fix="remove it, or name the others by a glob, as `data-*-of-00012.arrow`",
        )


# What `datasets` does


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


def _load(source: RowsSource) -> Any:
    """The rows of the split of a hub id, memory-mapped. Raises DataError where `datasets`
    cannot read them."""
    datasets = _datasets(source)
    try:
        return datasets.load_dataset(
            source.path, source.name, split=source.split, revision=source.revision
        )
    except Exception as error:  # what its readers raise depends on the file's kind
        raise _cannot_load(source, error) from error


def _rows_of_dataset(source: RowsSource, dataset: Any) -> Iterator[tuple[str, object]]:
    types = dataset.features
    if isinstance(source, HfSource):
        check_column(source, dict.fromkeys(dataset.column_names))
        dataset, types = dataset.select_columns([source.text_field]), None
    tables = dataset.with_format("arrow").iter(batch_size=ROWS_AT_ONCE)
    batches = (batch for table in tables for batch in table.to_batches())
    yield from rows_of(batches, shown(source.path), types)


def _cannot_load(source: RowsSource, error: Exception) -> DataError:
    reason = str(error.__cause__ or error) or type(error).__name__
    return DataError(
        f"cannot load `{shown(source.path)}`, split `{source.split}`: {reason}",
        fix="check path or hub id, `name` and `split`; without network, name local files, "
        "or download the dataset once while online",
    )
