"""The documents of a range of a file."""

import logging
from collections.abc import Iterable, Iterator
from functools import partial

from toolkit.data.formats.base import format_of, texts_of_rows
from toolkit.data.formats.files import FileRange
from toolkit.data.sources import decoded
from toolkit.recipe.schema import HfSource, TextSource

logger = logging.getLogger(__name__)


def texts(source: TextSource | HfSource, part: FileRange) -> Iterator[Iterable[str]]:
    """The documents of a range, each in parts; a row without text is the empty string.

    Raises DataError for a row that cannot be used, and when the file is no longer the one that
    was listed.
    """
    file = part.file
    file.check_unchanged()
    if isinstance(source, TextSource):
        said = "%s is not UTF-8; undecodable bytes were replaced by U+FFFD"
        yield decoded(file.blocks(), partial(logger.warning, said, file))
    else:
        form = format_of(file)
        assert form is not None, "listed files are of one known format"
        yield from ((text,) for text in texts_of_rows(form.rows(source, part), source))
    file.check_unchanged()
