"""The interface of a format: how files of one kind are listed, checked and read.

A format is one object in one file. Everything that reads data asks it: `dmt check` for columns,
a run for rows. A row belongs to one range of its file, and a whole file is one range.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path

from toolkit.data.dropped import DroppedRows
from toolkit.data.formats.columns import TEXT, add_kinds, check_column, wrong_text
from toolkit.data.formats.compressed import plain_ending
from toolkit.data.formats.files import FileRange, ListedFile, ListedFolder
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, RowsSource
from toolkit.registry import Registry


class Format:
    """Files of one kind that hold rows. Its modules import nothing heavy."""

    title = ""
    """What messages call its files, where a setting for other formats is refused."""
    endings: tuple[str, ...] = ()
    """Of its files' names, before that of a compression; none where an index names them."""
    index: tuple[str, ...] = ()
    """Files of a folder that name its others."""
    cut: tuple[str, ...] = ()
    """Those of `endings` whose files can be read in ranges, not only whole."""
    states_columns = True
    """A file says what columns it has; otherwise all of its rows must be read for that."""
    in_folders = False
    """Folders of such files need no index: `datasets` determines which belong to a split."""
    has_splits = False
    """An index names the files of several splits."""

    def holds(self, folder: ListedFolder) -> bool:
        """Whether the folder is of this format: an index in it names its files."""
        return any(name in folder.top for name in self.index)

    def files(self, source: RowsSource, folder: ListedFolder) -> list[ListedFile]:
        """The files of the source's split, in order, of a folder that it `holds`."""
        raise NotImplementedError

    def columns(self, files: Sequence[ListedFile]) -> tuple[dict[str, str], bool]:
        """Columns of some files with what they hold, as `check_column` names it, and whether no
        row has others; none where that is not known. Raises what reading raises."""
        raise NotImplementedError

    def rows(self, source: RowsSource, part: FileRange) -> Iterator[tuple[object, object]]:
        """The rows of a range, each with its place, whose text names it: a dict of columns, or
        `Broken`. Only the column `text_field` is needed of documents.

        Raises DataError when the file cannot be read, and for a row above the source's limit.
        """
        raise NotImplementedError


FORMATS: Registry[Format] = Registry(
    "dmt.formats",
    {
        "json": "toolkit.data.formats.json:JSON",
        "parquet": "toolkit.data.formats.parquet:PARQUET",
        "arrow": "toolkit.data.formats.arrow:ARROW",
        "text": "toolkit.data.formats.lines:LINES",
        "saved": "toolkit.data.formats.saved:SAVED_FOLDER",
    },
)
"""Those of rows, the first that knows a file's ending or folder reads it."""


def format_of(file: ListedFile | Path) -> Format | None:
    """The format of a file: of its ending, or what an index says; None where it is unknown."""
    if isinstance(file, ListedFile):
        if file.format is not None:
            return FORMATS[file.format]
        file = file.path
    ending = plain_ending(file)
    return next((form for form in formats() if ending in form.endings), None)


def folder_format(folder: ListedFolder) -> Format | None:
    """The format whose index is in a folder; None where `datasets` finds its files."""
    return next((form for form in formats() if form.holds(folder)), None)


def formats() -> Iterator[Format]:
    """All formats that can be imported, this package's own first."""
    return (form for _, form in FORMATS.items())


def only_format(files: Sequence[ListedFile | Path], path: str, known: str) -> Format:
    """The format of all files that `path` names; a DataError's fix names the `known` ones."""
    forms = {format_of(file) for file in files}
    form = forms.pop() if forms else None
    if forms or form is None:
        for name in FORMATS.names:
            FORMATS[name]  # raises where the package of another format cannot be imported
        found = f"`{path}` names files of different or unknown kinds"
        if files:
            first = files[0]
            found += f", e.g. {(first.path if isinstance(first, ListedFile) else first).name}"
        raise DataError(found, fix=f"name files of one kind: {known}")
    return form


def texts_of_rows(
    rows: Iterable[tuple[object, object]], source: HfSource
) -> Generator[str, None, bool]:
    """The texts of rows with their places, the empty string where one has none; returns
    whether there was a row.

    Raises DataError for a row that cannot be used, and where no row has the column.
    """
    column, dropped, columns = source.text_field, DroppedRows(source), dict[str, str]()
    for place, row in rows:
        if (why := wrong_text(row, column)) is not None:
            dropped.add(f"{place}: {why}")
            continue
        assert isinstance(row, dict), "anything else is wrong"
        if columns.get(column) != TEXT:
            add_kinds(columns, row)
        yield row.get(column) or ""
    if columns:
        check_column(source, columns)
    dropped.report()
    return bool(columns or dropped.count)
