"""The rows of a source, each with its place: which files hold them, and who reads these.

Files named by a path or glob, here or at a URL, and those that `datasets` finds for a split of
a folder, are read by `toolkit.data.readers`; rows of hub ids, folders of `save_to_disk` and
what a card takes apart, by `datasets`.
"""

import glob
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from os.path import normpath
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
from toolkit.data.remote import DataFile, RemoteFile, list_files, shown
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import HfSource, RowsSource

logger = logging.getLogger(__name__)

_COMMIT = re.compile(r"[0-9a-f]{40}")
_OF_FILES = re.compile(r"(train|all)\b")
"""Splits of files that are named one by one: `datasets` calls all of their rows `train`."""
_SAVED = ("state.json", "dataset_dict.json")
"""What `save_to_disk` of `datasets` writes into a folder of one split, or of several."""
_ABOUT = ("config.json", "dataset_info.json", "dataset_infos.json", *_SAVED)
"""Files of a folder that say something of the data."""
_MOST_NAMED = 5
"""Files, in a message."""
_NEUTRAL_CARD = (
    ("field", None), ("sample_by", "line"), ("filters", None), ("keep_linebreaks", False),
    ("encoding", "utf-8"), ("encoding_errors", None),
)  # fmt: skip
"""Settings of a card that change which rows a file has, each with the value that does not."""


@dataclass(frozen=True)
class Records:
    """The rows of a source, in a fixed order, as (place, value)."""

    source: RowsSource
    base: Path
    files: tuple[DataFile, ...]
    """All that `data_files` names; none for a hub id."""
    version: str
    """Of the contents: stays the same when files are only moved."""

    def __iter__(self) -> Iterator[tuple[str, object]]:
        source = self.source
        if self._splits is None:
            yield from _rows_of_dataset(source, self._dataset)
            return
        for name, start, stop in self._parts:
            yield from islice(self._rows(name), start, stop)

    def _rows(self, split: str) -> Iterator[tuple[str, object]]:
        assert self._splits is not None
        for file in self._splits[split]:
            yield from read_rows(file, self.source)

    @cached_property
    def _splits(self) -> Mapping[str, Sequence[DataFile]] | None:
        """The files of each split that the source names; None where `datasets` reads."""
        return splits_of(self.source, self.base, self.files) if self.files else None

    @cached_property
    def _parts(self) -> list[tuple[str, int, int | None]]:
        """The rows [start, stop) of splits that the source's `split` takes, in its order."""
        source = self.source
        if "[" not in source.split:
            return [(name, 0, None) for name in split_names(source)]
        counts = {name: sum(1 for _ in self._rows(name)) for name in self._splits or ()}
        try:
            spec = _datasets(source).ReadInstruction.from_spec(source.split)
            absolute = spec.to_absolute(counts)
        except (AssertionError, ValueError) as error:
            raise _cannot_load(source, error) from error
        return [(part.splitname, part.from_, part.to) for part in absolute]

    @cached_property
    def _dataset(self) -> Any:
        return _load(self.source, folder_of(self.source, self.base) if self.files else None)


def open_records(source: RowsSource, *, base: Path, cache: Path) -> Records:
    """Find the rows of `source`; relative paths start at `base`.

    `cache` is the folder with the hashes of files. Raises DataError if there are no files,
    BackendUnavailable if `datasets` is needed and missing.
    """
    files = data_files(source, base)
    if files is not None:
        return Records(source, base, tuple(files), content_fingerprint(files, cache))
    version = source.revision or ""
    if not _COMMIT.fullmatch(version):
        version = str(_load(source, None)._fingerprint)
    return Records(source, base, (), version)


# Files


def split_names(source: RowsSource) -> list[str]:
    """The splits, all or slices of which are read, in the order of the recipe."""
    return [part.partition("[")[0] for part in source.split.split("+")]


def folder_of(source: RowsSource, base: Path) -> Path | str | None:
    """The folder that `path` is, or its URL; None for files and hub ids."""
    if is_remote(source.path):
        return None if list_files(source.path) else source.path.rstrip("/")
    path = Path(normpath(base / Path(source.path).expanduser()))
    return path if path.is_dir() else None


def data_files(source: RowsSource, base: Path) -> list[DataFile] | None:
    """Files that `path` names, sorted, with what else decides the rows; None for a hub id.

    A local folder wins over a hub id of the same name, as in `datasets`. Raises DataError where
    there is none.
    """
    folder = folder_of(source, base)
    path = base / Path(source.path).expanduser()
    looks_local = (
        is_remote(source.path)
        or path.exists()
        or ending_of(path)
        or source.path.startswith((".", "/", "~"))
        or any(sign in source.path for sign in "*?[")
    )
    if not looks_local:
        return None
    files = find_files([source.path], base) if folder is None else _in_folder(folder)
    if source.revision is not None:
        raise DataError(
            f"`revision: {source.revision}` is given, but `{shown(source.path)}` is no hub id",
            fix="remove `revision`; it chooses a version of a hub dataset",
        )
    if folder is not None:
        return files
    if not _OF_FILES.match(source.split) or len({*split_names(source)}) > 1:
        raise DataError(
            f"`split: {source.split}` is given, but the rows of `{shown(source.path)}` are "
            "`train`",
            fix="write `split: train` next to `path`; folders and hub ids have other splits",
        )
    return files


def _in_folder(folder: Path | str) -> list[DataFile]:
    """The data files of a folder, and its card."""
    every = _all_files(folder)
    endings = {".arrow"} if _is_saved(folder) else {*ENDINGS}
    files = [file for file in every if ending_of(file) in endings]
    if not files:
        raise DataError(
            f"the folder {shown(str(folder))} holds no {', '.join(ENDINGS)} file",
            fix="name the folder that holds the data files",
        )
    if _is_saved(folder):
        return files
    return [*files, *(file for file in every if _is_card(file, folder))]


def _all_files(folder: Path | str) -> Sequence[DataFile]:
    if isinstance(folder, str):
        return list_files(f"{folder}/**/*")
    return [path for path in matching_paths("**/*", folder) if path.is_file()]


def _is_saved(folder: Path | str) -> bool:
    """Whether `save_to_disk` wrote it."""
    if isinstance(folder, Path):
        return any((folder / name).is_file() for name in _SAVED)
    return any(list_files(f"{folder}/{name}") for name in _SAVED)


def _is_card(file: DataFile, folder: Path | str) -> bool:
    """Whether it may say which files of the folder belong to which split."""
    return _name(file).parent == _name(folder) and _name(file).name == "README.md"


def _name(place: DataFile | str) -> PurePosixPath:
    return PurePosixPath(_url(place))


def _url(place: DataFile | str) -> str:
    return place.url if isinstance(place, RemoteFile) else str(place)


def splits_of(
    source: RowsSource, base: Path, files: Sequence[DataFile]
) -> Mapping[str, Sequence[DataFile]] | None:
    """Those of `data_files` that hold each split that the source names; None where `datasets`
    reads the rows: saved ones, and what a card takes apart.

    Raises DataError where they are of several kinds, a split has none, and where the folder has
    others of no split.
    """
    folder, names = folder_of(source, base), split_names(source)
    if folder is None:
        _check_kind(source, files)
        return {names[0]: files}
    if _is_saved(folder):
        return None
    splits = _splits_of_folder(source, folder, files)
    if splits is None:
        return None
    splits.setdefault("all", [file for some in splits.values() for file in some])
    for name in names:
        if not splits.get(name):
            raise DataError(
                f"`{shown(source.path)}` has no files of the split `{name}` "
                f"({_listed(splits)})",
                fix="write another `split`, or name the files by a glob in `path`",
            )
        _check_kind(source, splits[name])
    return {name: splits[name] for name in names}


def _listed(splits: Mapping[str, Sequence[DataFile]]) -> str:
    """The files of each split, for messages."""
    said = [
        f"{split}: {', '.join(_name(file).name for file in files[:_MOST_NAMED])}"
        + (" …" if len(files) > _MOST_NAMED else "")
        for split, files in splits.items()
        if split != "all" and files
    ]
    return "; ".join(said) or "no file belongs to a split"


def _check_kind(source: RowsSource, files: Sequence[DataFile]) -> None:
    kinds = {ending_of(file).replace("jsonl", "json") for file in files}
    if len(kinds) > 1 or "" in kinds:
        raise DataError(
            f"`{shown(source.path)}` names files of different or unknown kinds, e.g. "
            f"{_name(files[0]).name}",
            fix="name files of one kind: .json or .jsonl, .parquet, .arrow, .txt",
        )


def _splits_of_folder(
    source: RowsSource, folder: Path | str, files: Sequence[DataFile]
) -> dict[str, list[DataFile]] | None:
    """The data files of each split of a folder, as `datasets` finds them; None where a card
    takes parts of them.

    Raises DataError where a data file belongs to no split, unless a card says which do.
    """
    cards = [file for file in files if _is_card(file, folder)]
    stated = any(_states_files(card) for card in cards)
    found = _found_by_datasets(source, folder, stated)
    if found is None:
        return None
    named = {_as_found(file, folder): file for file in files}
    known = {split: [named.get(name) for name in names] for split, names in found.items()}
    splits = {
        split: [file for file in some if file is not None] for split, some in known.items()
    }
    if stated:
        return splits if splits == known else None
    kinds = {ending_of(file) for some in splits.values() for file in some}
    if kinds > {".txt"}:  # a licence beside rows, for example
        splits = {
            split: [file for file in some if ending_of(file) != ".txt"]
            for split, some in splits.items()
        }
    used = {*cards, *(file for some in splits.values() for file in some)}
    unread = [file for file in _all_files(folder) if file not in used]
    rows = {*ENDINGS} - ({".txt"} if kinds != {".txt"} else set())
    data = [file for file in unread if ending_of(file) in rows]
    if data := [file for file in data if _name(file).name not in _ABOUT]:
        raise DataError(
            f"`{shown(source.path)}` has files that belong to no split: "
            f"{', '.join(_name(file).name for file in data[:_MOST_NAMED])} ({_listed(splits)})",
            fix="name the files to read by a glob in `path`, or move the others away",
        )
    if unread:
        names = ", ".join(_name(file).name for file in unread[:_MOST_NAMED])
        logger.warning("%s: not read, no rows: %s", shown(source.path), names)
    return splits


def _as_found(file: DataFile, folder: Path | str) -> str:
    """What `datasets` calls a file of the folder."""
    if isinstance(file, RemoteFile) or isinstance(folder, str):
        return _unpinned(_url(file))
    return str(folder.resolve() / file.relative_to(folder))


def _unpinned(url: str) -> str:
    """Without the commit of a hub's repository."""
    return re.sub(f"@{_COMMIT.pattern}", "", url)


def _states_files(card: DataFile) -> bool:
    from huggingface_hub import DatasetCard

    with card.open("rb") as stream:
        text = stream.read().decode(errors="replace")
    return bool(DatasetCard(text, ignore_metadata_errors=True).data.get("configs"))


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


def _found_by_datasets(
    source: RowsSource, folder: Path | str, stated: bool
) -> dict[str, list[str]] | None:
    """Paths or URLs of the files of each split of a folder, where a card has `stated` them by
    that; None if it takes parts of them.

    Raises DataError where there is none.
    """
    datasets = _datasets(source)
    place = str(folder)
    if stated and (is_remote(place) or glob.has_magic(place)):
        raise DataError(
            f"`{shown(place)}` has a card that says which files belong to which split, and is "
            "a URL, or has `*`, `?` or `[` in its name",
            fix="name the files by a glob in `path`",
        )
    try:
        if stated:
            config = datasets.load_dataset_builder(place, name=source.name).config
            if any(getattr(config, name, value) != value for name, value in _NEUTRAL_CARD):
                return None
            found = config.data_files or {}
        else:
            base = place if is_remote(place) else glob.escape(str(Path(place).resolve()))
            patterns = datasets.data_files.get_data_patterns(base)
            found = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=base)
    except Exception as error:  # what it raises depends on the files
        raise _cannot_load(source, error) from error
    return {
        str(split): [_unpinned(str(name)) for name in names] for split, names in found.items()
    }


def _load(source: RowsSource, folder: Path | str | None) -> Any:
    """The rows of the split of a hub id or of a folder, memory-mapped. Raises DataError where
    `datasets` cannot read them."""
    datasets = _datasets(source)
    try:
        if folder is not None and _is_saved(folder):
            saved = datasets.load_from_disk(str(folder))
        else:
            path, revision = (
                (source.path, source.revision) if folder is None else (str(folder), None)
            )
            return datasets.load_dataset(
                path, source.name, split=source.split, revision=revision
            )
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
        fix="check path or hub id, `name` and `split`; without network, give a local file or "
        "folder, or download the dataset once while online",
    )
