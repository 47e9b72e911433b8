"""The files of a source, in order, without reading rows.

A folder whose format has an index names its files. The files of a split of a hub id, or of a
folder of data files, are determined by `datasets`.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from toolkit.data.files import find_files
from toolkit.data.formats.base import Format, folder_format, format_of, formats, only_format
from toolkit.data.formats.files import ListedFile, ListedFolder
from toolkit.data.formats.saved import saved_files
from toolkit.data.huggingface import data_files_of, split_name
from toolkit.data.remote.store import list_files as stored_files
from toolkit.errors import DataError
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import RowsSource

_OF_FILES = re.compile(r"(train|all)\b")
"""Splits of files that are named one by one: `datasets` calls all of their rows `train`."""
_NEUTRAL = {"kind": "hf", "split": "train", "name": None}
KNOWN = ".json or .jsonl, .parquet, .arrow, .txt"
"""Files of this package's own formats, for messages."""


def local_path(source: RowsSource, base: Path) -> Path:
    """Where `path` is, if it is on this machine."""
    return base / Path(source.path).expanduser()


def local_folder(source: RowsSource, base: Path) -> tuple[Format, ListedFolder] | None:
    """The local folder that `path` names, if an index in it names its files."""
    path = local_path(source, base)
    if is_remote(source.path) or not path.is_dir():
        return None
    folder = ListedFolder.here(path)
    form = folder_format(folder)
    return None if form is None else (form, folder)


def local_files(source: RowsSource, base: Path) -> list[Path] | None:
    """Data files that `path` names, sorted, with what else decides the rows; None when it is a
    hub id or a URL.

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
    of_files = _OF_FILES.match(source.split) and split_name(source) is not None
    if not local_path(source, base).is_dir() and not of_files:
        raise DataError(
            f"`split: {source.split}` is given, but the rows of `{source.path}` are `train`",
            fix="write `split: train` next to `path`; folders and hub ids have other splits",
        )
    return files


def _local_files(source: RowsSource, base: Path) -> list[Path] | None:
    if is_remote(source.path):
        return None
    path = local_path(source, base)
    if path.is_dir():
        return _files_of_folder(source, ListedFolder.here(path), path)
    looks_local = (
        path.exists()
        or format_of(Path(source.path)) is not None
        or source.path.startswith((".", "/", "~"))
        or any(sign in source.path for sign in "*?[")
    )
    return find_files([source.path], base) if looks_local else None


def _files_of_folder(source: RowsSource, folder: ListedFolder, path: Path) -> list[Path]:
    form = folder_format(folder)
    if form is not None and not form.has_splits:
        shards = form.files(source, folder)
        _check_neutral(source, *_NEUTRAL, of=form)
        return [*(path / name for name in form.index), *(file.path for file in shards)]
    files = [
        file.path
        for file in folder.files.values()
        if (known := format_of(file.path)) is not None and known.in_folders
    ]
    if form is not None:
        saved_files(source, folder)
        files = [file for file in files if file.suffix == ".arrow"]
    if not files:
        endings = ", ".join(
            end for form in formats() if form.in_folders for end in form.endings
        )
        raise DataError(
            f"the folder {path} holds no {endings} file",
            fix="name the folder that holds the data files",
        )
    # The card may say which file belongs to which split.
    card = path / "README.md"
    return [*files, card] if card.is_file() and form is None else files


def _check_neutral(source: RowsSource, *settings: str, of: Format) -> None:
    """Raise DataError for a setting that chooses among rows which are all read by the format
    `of` the files."""
    for key in settings:
        if (value := getattr(source, key)) != _NEUTRAL[key]:
            raise DataError(
                f"`{key}: {value}` is given for {of.title} (`{source.path}`)",
                fix="read them with `kind: hf`, without `split` and `name`",
            )


def split_files(
    source: RowsSource, base: Path, files: Sequence[Path]
) -> tuple[Format, list[ListedFile]] | None:
    """The format of these local files, and those of them that hold the split; None where
    `datasets` reads the rows: of hub ids, of several splits, and what a card takes apart."""
    if not files:
        return None
    listed = [*map(ListedFile.of, files)]
    if (indexed := local_folder(source, base)) is not None:
        form, folder = indexed
        listed = form.files(source, folder)
    elif (path := local_path(source, base)).is_dir():
        try:
            split = source.model_copy(update={"split": split_name(source)})
            listed = [*_at(data_files_of(split, path))]
            return only_format(listed, source.path, KNOWN), listed
        except DataError:  # `datasets` reads it, or says what is wrong
            return None
    form = only_format(listed, source.path, KNOWN)
    if not (form.in_folders or form.index):
        _check_neutral(source, "split", "name", of=form)
    return form, listed


def _at(places: Iterable[str]) -> Iterator[ListedFile]:
    """The files at paths or URLs; of a repository of the hub, it is asked once."""
    repositories: dict[str, dict[str, ListedFile]] = {}
    for place in places:
        if not is_remote(place):
            yield ListedFile.of(Path(place))
            continue
        repository, _, rest = place.partition("@")
        root = f"{repository}@{rest.partition('/')[0]}"
        if root not in repositories:
            files = map(ListedFile.stored, stored_files(f"{root}/**/*"))
            repositories[root] = {str(file.remote.url): file for file in files if file.remote}
        yield repositories[root][place]
