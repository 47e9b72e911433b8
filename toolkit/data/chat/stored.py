"""Tokenises chats once. The result is cached by content.

An entry is a pair of files in Megatron's indexed format, like those of texts, and a report. A
conversation is a document of it, a preference is two. A token that is not trained is stored as
the bitwise complement of its id, which is negative. The last document holds, of each of the
others, the number of its row in the data set.
"""

import json
import logging
from array import array
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.chat.conversations import check_columns
from toolkit.data.chat.maker import Batch, SampleMaker
from toolkit.data.chat.report import ChatReport
from toolkit.data.chat.workers import made_in_order
from toolkit.data.files import fingerprint_of, write_cached
from toolkit.data.indexed import IndexedTokens, write_indexed
from toolkit.data.progress import Track, untracked
from toolkit.data.records import Records, open_records
from toolkit.data.rows import Int64Array
from toolkit.data.tokenized import TokenizedData, cached_tokens
from toolkit.data.tokenizers import tokenizer_fingerprint
from toolkit.recipe.schema import ChatSource, DataSection, PreferenceSource, SourceSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_CACHE_VERSION = 4
"""Increment it whenever the same rows, template and tokenizer would give different samples."""
_FORMAT = 4
"""Increment it whenever the same samples would be stored differently."""
_ROWS_AT_ONCE = 512
"""Rows of a batch."""


def prepare_chats(
    source: ChatSource | PreferenceSource,
    data: DataSection,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    sequence_length: int,
    cache: Path,
    track: Track = untracked,
) -> TokenizedData:
    """Samples of `source`, by the tokenizer's chat template: from the cache, or created now.

    The parameters are those of `prepare` in `toolkit/data/tokenized.py`.

    Raises DataError when the data, the template or the mask leaves nothing to train on.
    """
    records = open_records(source, cache)
    text = tokenizer.chat_template
    whose = {*SourceSection.model_fields, "path", "name", "revision", "split"}
    settings = source.model_dump(exclude=whose, exclude_defaults=True)
    key = fingerprint_of(
        [
            ["chat", _CACHE_VERSION, _fingerprint(records), tokenizer_fingerprint(tokenizer)],
            [text, dict(tokenizer.special_tokens_map), data.special_tokens],
            [settings, sequence_length],
        ]
    )
    prefix = cache / "tokens" / fingerprint_of([key, _FORMAT])
    report_file = prefix.with_name(f"{prefix.name}.json")

    def rows() -> Iterator[Int64Array]:
        parse = data.special_tokens == "parse"
        maker = SampleMaker(source, tokenizer, sequence_length, parse_special=parse)
        report, row_numbers = ChatReport(), array("i")
        for made in made_in_order(maker, _batches(track(records, "tokenising"), source)):
            report += made.report
            for number, tokens in made.stored:
                row_numbers.append(number)
                yield tokens
        report.check_enough(source, sequence_length)
        yield np.array(row_numbers, dtype=np.int64)
        write_cached(report_file, json.dumps(asdict(report)))

    make = partial(write_indexed, prefix, np.int32, rows())
    indexed = cached_tokens(prefix, make, report_file)
    report = ChatReport.read(report_file)
    for said in report.notes(source, data.chat_template is not None):
        logger.warning("%s: %s", source.path, said)
    tokens, starts = indexed.tokens, indexed.document_offsets
    last = int(starts[-1]) // tokens.itemsize
    chats = IndexedTokens(tokens[:last], starts[:-1])
    return TokenizedData(chats, key, str(prefix), tokens[last:], report)


def _batches(
    records: Iterator[tuple[object, object]], source: ChatSource | PreferenceSource
) -> Iterator[Batch]:
    """Rows, numbered from 1. Raises DataError if their columns are not what the recipe
    states."""
    columns = dict[str, None]()
    numbered = ((number, *record) for number, record in enumerate(records, start=1))
    while batch := list(islice(numbered, _ROWS_AT_ONCE)):
        first = not columns
        maps = (row for _, _, row in batch if isinstance(row, dict))
        columns |= dict.fromkeys(column for row in maps for column in row)
        if first and columns:
            check_columns(source, columns)
        yield batch
    if columns:
        check_columns(source, columns, all_rows=True)


def _fingerprint(records: Records) -> str:
    source, parts = records.source, [records.version, records.source.name, records.source.split]
    if not records.files:
        parts = ["hub", source.path, source.name, source.split, records.version]
    return fingerprint_of(parts)
