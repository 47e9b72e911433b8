"""The documents of a range of a file."""

import logging
from collections.abc import Iterable, Iterator
from functools import partial

from toolkit.data.dropped import DroppedRows
from toolkit.data.files import unreadable
from toolkit.data.formats.base import checked_texts, format_of
from toolkit.data.formats.columns import check_column
from toolkit.data.formats.files import FileRange, ListedFile
from toolkit.data.sources import decoded
from toolkit.recipe.schema import HfSource, TextSource

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2**23


def texts(source: TextSource | HfSource, part: FileRange) -> Iterator[Iterable[str]]:
    """The documents of a range, each in parts; a row without text is the empty string.

    Raises DataError for a row that cannot be used, and when the file is no longer the one that
    was listed.
    """
    file = part.file
    file.check_unchanged()
    if isinstance(source, TextSource):
        said = "%s is not UTF-8; undecodable bytes were replaced by U+FFFD"
        yield decoded(_blocks(file), partial(logger.warning, said, file))
    else:
        form, dropped, columns = format_of(file), DroppedRows(source), dict[str, str]()
        assert form is not None, "listed files are of one known format"
        rows = form.rows(source, part)
        yield from ((text or "",) for text in checked_texts(rows, source, dropped, columns))
        if columns:
            check_column(source, columns)
        dropped.report()
    file.check_unchanged()


def _blocks(file: ListedFile) -> Iterator[bytes]:
    try:
        with file.open() as stream:
            while block := stream.read(_BLOCK_BYTES):
                yield block
    except OSError as error:
        raise unreadable(file.path, error) from error
