"""What the `datasets` library determines: rows of hub ids, files of splits, and slices."""

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.data.formats.arrow import ROWS_AT_ONCE, rows_of, without_added_nulls
from toolkit.data.formats.columns import arrow_kinds, check_column
from toolkit.data.formats.saved import of_split
from toolkit.errors import BackendUnavailable, DataError
from toolkit.recipe.schema import HfSource, RowsSource

_COMMIT_LENGTH = 40


def hub_version(source: RowsSource, base: Path) -> str:
    """What identifies the rows of a hub id. A full commit hash needs no look at the hub."""
    revision = source.revision or ""
    if len(revision) == _COMMIT_LENGTH and set(revision) <= set("0123456789abcdef"):
        return revision
    return str(load_rows(source, base, ())._fingerprint)


def load_rows(source: RowsSource, base: Path, files: Sequence[Path]) -> Any:
    """The rows of the split of a hub id or, if it has `files`, of a local folder,
    memory-mapped. Raises DataError where `datasets` cannot read them."""
    where = {"path": source.path, "revision": source.revision}
    if files:
        where = {"path": str(base / Path(source.path).expanduser())}
    try:
        return _datasets(source).load_dataset(**where, name=source.name, split=source.split)
    except BackendUnavailable:
        raise
    except Exception as error:  # what its readers raise depends on the file's kind
        raise _cannot_load(source, files, error) from error


def rows_of_dataset(source: RowsSource, dataset: Any) -> Iterator[tuple[object, object]]:
    """The rows that `load_rows` gives, each with its place."""
    if not isinstance(source, HfSource):
        for number, row in enumerate(dataset, start=1):
            yield f"{source.path}, row {number}", without_added_nulls(row, dataset.features)
        return
    check_column(source, arrow_kinds(dataset.features.arrow_schema))
    tables = dataset.select_columns([source.text_field]).with_format("arrow")
    batches = (
        batch for table in tables.iter(batch_size=ROWS_AT_ONCE) for batch in table.to_batches()
    )
    yield from rows_of(batches, f"`{source.path}`")


def slices(source: RowsSource, files: Sequence[Path], n_rows: int) -> list[tuple[int, int]]:
    """The rows [start, stop) that the source's `split` takes of so many."""
    try:
        spec = _datasets(source).ReadInstruction.from_spec(source.split)
        absolute = spec.to_absolute({split_name(source): n_rows})
    except (AssertionError, ValueError) as error:
        raise _cannot_load(source, files, error) from error
    return [(part.from_, part.to) for part in absolute]


def split_name(source: RowsSource) -> str | None:
    """The split, all or slices of which are read; None for several."""
    names = {part.partition("[")[0] for part in source.split.split("+")}
    return names.pop() if len(names) == 1 else None


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


_NEUTRAL_CARD = (
    ("field", None), ("sample_by", "line"), ("filters", None), ("keep_linebreaks", False),
    ("encoding", "utf-8"), ("encoding_errors", None),
)  # fmt: skip
"""Settings of a card that change which rows a file has, each with the value that does not."""


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
    for setting, default in _NEUTRAL_CARD:
        if (value := getattr(builder.config, setting, default)) != default:
            raise DataError(
                f"`{source.path}` has `{setting}: {value}` in its card",
                fix="let `datasets` read it",
            )
    return [str(file) for file in of_split(source, builder.config.data_files or {})]


def _cannot_load(source: RowsSource, files: Sequence[Path], error: Exception) -> DataError:
    reason = str(error.__cause__ or error) or type(error).__name__
    if files:
        fix = "check the file's format, and `split`: single files have the split `train`"
    else:
        fix = (
            "check the hub id, `name` and `split`; without network, give a local file or "
            "folder, or download the dataset once while online"
        )
    return DataError(f"cannot load `{source.path}`, split `{source.split}`: {reason}", fix=fix)
