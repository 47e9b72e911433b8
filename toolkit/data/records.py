"""The rows of a source, each with its place: which files hold them, and who reads these.

Files named by a path or glob, here or at a URL, are read by `toolkit.data.readers`; rows of hub
ids and of folders, by `datasets`.
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

from toolkit.data.columns import arrow_kinds, check_column
from toolkit.data.listing import content_fingerprint, find_files, matching_paths
from toolkit.data.readers import (
    ENDINGS,
    ROWS_AT_ONCE,
    ending_of,
    read_rows,
    rows_of,
    without_added_nulls,
)
from toolkit.data.remote import DataFile, shown
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import HfSource, RowsSource

_COMMIT = re.compile(r"[0-9a-f]{40}")
_OF_FILES = re.compile(r"(train|all)\b")
"""Splits of files: `datasets` calls all of their rows `train`."""
_SAVED = ("state.json", "dataset_dict.json")
"""One of them is in a folder that `save_to_disk` wrote."""
_ABOUT = ("config.json", "dataset_info.json", "dataset_infos.json")
"""Files of a folder that say something of its rows."""


@dataclass(frozen=True)
class Records:
    """The rows of a source, in a fixed order, as (place, value)."""

    source: RowsSource
    files: tuple[DataFile, ...]
    """All that `data_files` names; none for a hub id or a folder."""
    version: str
    """Version of the contents: stays the same when files are only moved."""
    folder: Path | None = None
    """One on this machine, whose rows `datasets` reads."""

    @property
    def is_hub(self) -> bool:
        return not self.files and self.folder is None

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
        return _load(self.source, self.folder)


def open_records(source: RowsSource, *, base: Path, cache: Path) -> Records:
    """Find the rows of `source`; relative paths start at `base`.

    `cache` is the folder with the hashes of files. Raises DataError if there are no files,
    BackendUnavailable if `datasets` is needed and missing.
    """
    files = data_files(source, base)
    if files is not None:
        return Records(source, tuple(files), content_fingerprint(files, cache))
    folder = base / Path(source.path).expanduser()
    if folder.is_dir():
        inside = sorted(path for path in matching_paths("**/*", folder) if path.is_file())
        return Records(source, (), content_fingerprint(inside, cache), folder)
    version = source.revision or ""
    if not _COMMIT.fullmatch(version):
        version = str(_load(source, None)._fingerprint)
    return Records(source, (), version)


# Files


def _split_names(source: RowsSource) -> list[str]:
    """The splits, all or slices of which are read, in the order of the recipe."""
    return [part.partition("[")[0] for part in source.split.split("+")]


def data_files(source: RowsSource, base: Path) -> list[DataFile] | None:
    """Files that `path` names, sorted; None for a hub id and for a folder on this machine.

    A local path wins over a hub id of the same name, as in `datasets`. Raises DataError where
    there is no file of rows, and for files of several kinds.
    """
    path, name = base / Path(source.path).expanduser(), shown(source.path)
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
        if not any(map(ending_of, matching_paths("**/*", path))):
            raise DataError(
                f"the folder `{name}` holds no {', '.join(ENDINGS)} file",
                fix="name the folder that holds the data files",
            )
        return None
    files = find_files([source.path], base)
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


def _load(source: RowsSource, folder: Path | None) -> Any:
    """The rows of the split of a hub id or a folder, memory-mapped. Raises DataError where
    `datasets` cannot read them."""
    datasets = _datasets(source)
    try:
        if folder is None or not any((folder / name).is_file() for name in _SAVED):
            place = source.path if folder is None else str(folder)
            if folder is not None and not (folder / "README.md").is_file():
                _check_all_read(source, folder, datasets.load_dataset_builder(place))
            return datasets.load_dataset(
                place, source.name, split=source.split, revision=source.revision
            )
        saved = datasets.load_from_disk(str(folder))
    except DataError:
        raise
    except Exception as error:  # what its readers raise depends on the file's kind
        raise _cannot_load(source, error) from error
    splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
    if source.split not in splits:
        raise DataError(
            f"`split: {source.split}` is given, but `{shown(source.path)}` was saved with "
            f"{', '.join(map(str, splits)) or 'none'}",
            fix="name a whole split of it; slices are for files and hub ids",
        )
    return splits[source.split]


def _check_all_read(source: RowsSource, folder: Path, builder: Any) -> None:
    """Raise DataError where files of rows in a folder without a card belong to no split."""
    splits = (builder.config.data_files or {}).values()
    read = {Path(name).resolve() for names in splits for name in names}
    found = [path for path in matching_paths("**/*", folder) if path.name not in _ABOUT]
    rows = [path for path in found if ending_of(path) not in ("", ".txt")]
    if left := [path.name for path in rows if path.resolve() not in read]:
        raise DataError(
            f"`{shown(source.path)}` has files that belong to no split: {', '.join(left[:5])}",
            fix="name the files to read by a glob in `path`, or move the others away",
        )


def _rows_of_dataset(source: RowsSource, dataset: Any) -> Iterator[tuple[str, object]]:
    if not isinstance(source, HfSource):
        for number, row in enumerate(dataset, start=1):
            row = without_added_nulls(row, dataset.features)
            yield f"{shown(source.path)}, row {number:,}", row
        return
    check_column(source, arrow_kinds(dataset.features.arrow_schema))
    tables = dataset.select_columns([source.text_field]).with_format("arrow")
    batches = (
        batch for table in tables.iter(batch_size=ROWS_AT_ONCE) for batch in table.to_batches()
    )
    yield from rows_of(batches, f"`{shown(source.path)}`")


def _cannot_load(source: RowsSource, error: Exception) -> DataError:
    reason = str(error.__cause__ or error) or type(error).__name__
    return DataError(
        f"cannot load `{shown(source.path)}`, split `{source.split}`: {reason}",
        fix="check path or hub id, `name` and `split`; without network, name local files or a "
        "folder, or download the dataset once while online",
    )
