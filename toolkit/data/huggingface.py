"""What the `datasets` library reads: hub ids, folders of files with splits, and slices."""

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.data.formats.base import FORMATS, Format, format_of, formats, only_format
from toolkit.data.formats.files import ListedFile, ListedFolder
from toolkit.data.formats.saved import of_split, saved_files
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.schema import RowsSource

_COMMIT_LENGTH = 40


def hub_version(source: RowsSource, base: Path) -> str:
    """What identifies the rows of a hub id. A full commit hash needs no look at the hub."""
    revision = source.revision or ""
    if len(revision) == _COMMIT_LENGTH and set(revision) <= set("0123456789abcdef"):
        return revision
    return str(load_rows(source, base, ())._fingerprint)


def load_rows(source: RowsSource, base: Path, files: Sequence[Path]) -> Any:
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
    folder = base / Path(source.path).expanduser()
    arguments = _load_arguments(source, folder, files)
    try:
        for form, file in _listed(files):
            form.check(source, file)
        if files and folder.is_dir():
            listed = ListedFolder.here(folder)
            if FORMATS["saved"].holds(listed):
                split, _ = saved_files(source, listed)
                return datasets.load_from_disk(str(folder / split))
        return datasets.load_dataset(**arguments, split=source.split)
    except DataError:
        raise
    except Exception as error:  # what its readers raise depends on the file's kind
        known = _listed(files)
        for form in formats():
            form.explain(source, [file for of, file in known if of is form])
        raise _cannot_load(source, files, error) from error


def _listed(files: Sequence[Path]) -> list[tuple[Format, ListedFile]]:
    forms = [(format_of(file), file) for file in files]
    return [(form, ListedFile.of(file)) for form, file in forms if form is not None]


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
    path = source.path if folder is None else str(folder)
    try:
        builder = _datasets(source).load_dataset_builder(
            path, name=source.name, revision=source.revision
        )
    except BackendUnavailable:
        raise
    except Exception as error:  # what it raises depends on the file's kind
        raise _cannot_load(source, (), error) from error
    for setting, default in (("field", None), ("sample_by", "line"), ("filters", None)):
        if (value := getattr(builder.config, setting, default)) != default:
            raise DataError(
                f"`{source.path}` has `{setting}: {value}` in its card, which is not streamed",
                fix="remove `data.streaming`",
            )
    return [str(file) for file in of_split(source, builder.config.data_files or {})]


def _load_arguments(source: RowsSource, folder: Path, files: Sequence[Path]) -> dict[str, Any]:
    if not files:
        return {"path": source.path, "name": source.name, "revision": source.revision}
    if folder.is_dir():
        return {"path": str(folder), "name": source.name}
    known = ".json or .jsonl, .parquet, .arrow, .txt; MDS shards by their folder"
    form = only_format(files, source.path, known)
    names = [str(file) for file in files]
    return {"path": form.builder, "name": source.name, "data_files": {"train": names}}


def _cannot_load(source: RowsSource, files: Sequence[Path], error: Exception) -> DataError:
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
