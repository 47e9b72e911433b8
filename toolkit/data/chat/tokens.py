"""Tokenises chats once; the result is cached by content.

An entry is a pair of files in Megatron's indexed format, like those of texts, and a report. A
document of it is one sample: the number of its row in the data set, then its tokens, each that
is trained as its bitwise complement, which is negative. A preference is two documents.
"""

import json
import logging
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.chat.conversations import (
    Conversation,
    Example,
    MalformedRow,
    check_columns,
    check_mapped,
    conversation_of,
    preference_of,
    texts_of,
    without_nulls,
)
from toolkit.data.chat.template import (
    ChatTemplate,
    MarkedText,
    MarkedTokens,
    RewrittenHistory,
)
from toolkit.data.dropped import DroppedRows
from toolkit.data.files import fingerprint_of, write_cached
from toolkit.data.formats.indexed import IndexedTokens, write_indexed
from toolkit.data.progress import Track, untracked
from toolkit.data.records import Records, open_records
from toolkit.data.rows import Int64Array
from toolkit.data.tokenized import cached_tokens
from toolkit.data.tokenizers import tokenizer_fingerprint
from toolkit.errors import DataError
from toolkit.recipe.schema import ChatSource, DataSection, PreferenceSource, SourceSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_CACHE_VERSION = 3
"""Increment it whenever the same rows, template and tokenizer would give different samples."""
_READING = 1
"""Increment it, instead, where only some rows would: `ChatReport.newly_read` counts them."""
LIMIT_S = 30.0
"""Of CPU time, for a row: a chat template is a program of others, which may never end."""
_ROWS_AT_ONCE = 512
"""Rows that are tokenised together, in parallel."""


@dataclass(frozen=True)
class ChatReport:
    rows: int = 0
    malformed: int = 0
    """Rows that were dropped because they are not conversations."""
    first_malformed: str = ""
    too_long: int = 0
    """Samples longer than a row: truncated, dropped or split."""
    untrained: int = 0
    """Samples dropped because none of their tokens is trained; pieces of a split one are not
    counted if other pieces remain."""
    cut_off: int = 0
    """Those of them whose trained tokens lay behind the cut."""
    rewritten: int = 0
    equal: int = 0
    """Preferences whose two answers are equal."""
    first_equal: str = ""
    samples: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    newly_read: int = 0
    """Rows that are read differently from `_READING` 0. A run without any continues."""

    def summary(self, too_long: str) -> str:
        """What was dropped or changed; empty if nothing was."""
        did = {"truncate": "truncated", "drop": "dropped", "split": "split"}[too_long]
        parts = [
            (self.malformed, f"malformed rows dropped (the first: {self.first_malformed})"),
            (self.too_long, f"too long and {did}"),
            (self.untrained, "without a trained token dropped"),
            (self.equal, f"with two equal answers (the first: {self.first_equal})"),
            (self.rewritten, "made into one sample per assistant turn"),
        ]
        said = ", ".join(f"{number:,} {what}" for number, what in parts if number)
        return f"{self.rows:,} rows, {self.samples:,} samples: {said}" if said else ""


@dataclass(frozen=True)
class StoredChats:
    """The samples of one source, memory-mapped."""

    indexed: IndexedTokens
    report: ChatReport
    fingerprint: str
    """Changes with the rows, the template, the tokenizer and every setting of the masks."""

    def lengths(self) -> Int64Array:
        """Tokens of each stored row, int64 [rows]."""
        numbers = np.arange(self.indexed.n_documents + 1, dtype=np.int64)
        return np.diff(self.indexed.document_starts(numbers)) - 1

    def source_rows(self) -> Int64Array:
        """Row of the data set that each stored row comes from, int64 [rows]."""
        numbers = np.arange(self.indexed.n_documents, dtype=np.int64)
        starts, tokens = self.indexed.document_starts(numbers), self.indexed.tokens
        assert isinstance(tokens, np.ndarray), "in the cache"
        return np.asarray(tokens[starts], dtype=np.int64)

    def read(self, number: int) -> MarkedTokens:
        bounds = self.indexed.document_starts(np.array([number, number + 1]))
        stored = self.indexed.tokens[bounds[0] + 1 : bounds[1]].astype(np.int64)
        return MarkedTokens(np.where(stored < 0, ~stored, stored), stored < 0)


def prepare_chats(
    source: ChatSource | PreferenceSource,
    data: DataSection,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    sequence_length: int,
    base: Path,
    cache: Path,
    track: Track = untracked,
) -> StoredChats:
    """Samples of `source`, by the tokenizer's chat template: from the cache, or created now.

    The parameters are those of `prepare` in `toolkit/data/tokenized.py`.

    Raises DataError when the data, the template or the mask leaves nothing to train on.
    """
    records = open_records(source, base=base, cache=cache, track=track)
    text = tokenizer.chat_template
    whose = {*SourceSection.model_fields, "path", "name", "revision", "split", "row_limit_mib"}
    settings = source.model_dump(exclude=whose, exclude_defaults=True)
    key = fingerprint_of(
        [
            ["chat", _CACHE_VERSION, _fingerprint(records), tokenizer_fingerprint(tokenizer)],
            [text, dict(tokenizer.special_tokens_map), data.special_tokens],
            [settings, sequence_length],
        ]
    )
    prefix = cache / "tokens" / fingerprint_of([key, _READING])
    report_file = prefix.with_name(f"{prefix.name}.json")

    def make() -> None:
        template = ChatTemplate(text, tokenizer)
        special = template.special if data.special_tokens == "text" else None
        maker = _Maker(source, template, special, sequence_length)

        def rows() -> Iterator[Int64Array]:
            yield from maker.samples(track(records, "tokenising", None))
            _check_enough(maker.report, source, sequence_length)
            write_cached(report_file, json.dumps(asdict(maker.report)))

        with maker.limited():
            write_indexed(prefix, np.int32, rows())

    indexed = cached_tokens(prefix, make, report_file)
    report = ChatReport(**json.loads(report_file.read_text()))
    if said := report.summary(source.too_long):
        logger.warning("%s: %s", source.path, said)
    return StoredChats(indexed, report, prefix.name if report.newly_read else key)


def _fingerprint(records: Records) -> str:
    source, parts = records.source, [records.version, records.source.name, records.source.split]
    if not records.files:
        parts = ["hub", source.path, source.name, source.split, records.version]
    return fingerprint_of(parts)


class _Maker:
    """Creates samples from rows, and counts dropped and changed ones."""

    def __init__(
        self,
        source: ChatSource | PreferenceSource,
        template: ChatTemplate,
        special: "re.Pattern[str] | None",
        sequence_length: int,
    ) -> None:
        self._source = source
        self._template = template
        self._special = special
        """Special tokens that no row may spell out; None: anything is allowed."""
        self._length = sequence_length
        self._dropped = DroppedRows(source)
        self._rendered: object = None
        """Place of the row that the template is rendering."""
        self._stuck: object = None
        """The same at the last look."""
        self.report = ChatReport()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """In the main thread: raise DataError while the template renders one row for more than
        `LIMIT_S` seconds of CPU time, up to twice as many."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = signal.signal(signal.SIGVTALRM, self._look)
        signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S, LIMIT_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler)

    def _look(self, *_: object) -> None:
        if self._rendered is not None and self._rendered is self._stuck:
            raise DataError(
                f"{self._rendered}: the chat template takes more than {LIMIT_S:g} s of CPU "
                "time for this row",
                fix="correct the row, or name another template in `data.chat_template`",
            )
        self._stuck = self._rendered

    def _count(self, **more: int) -> None:
        counts = {name: getattr(self.report, name) + number for name, number in more.items()}
        self.report = replace(self.report, **counts)

    def samples(self, records: Iterable[tuple[object, object]]) -> Iterator[Int64Array]:
        """Stored rows of all samples: int64 [1 + tokens], see this module."""
        numbered = enumerate(records, start=1)
        columns: dict[str, None] = {}
        while batch := list(islice(numbered, _ROWS_AT_ONCE)):
            maps = (row for _, (_, row) in batch if isinstance(row, dict))
            columns |= dict.fromkeys(column for row in maps for column in row)
            if columns and not self.report.rows:
                check_columns(self._source, list(columns))
            self._count(rows=len(batch))
            made = [
                (number, marked)
                for number, (place, row) in batch
                for marked in self._marked(place, row)
            ]
            self._rendered = None
            tokens = iter(self._template.encode([text for _, texts in made for text in texts]))
            for number, texts in made:
                for sample in self._fitted([next(tokens) for _ in texts]):
                    for one in sample:
                        self._count(
                            tokens=len(one.ids), trained_tokens=int(one.trained[1:].sum())
                        )
                        stored = np.where(one.trained, ~one.ids, one.ids)
                        yield np.concatenate([[number], stored])
        if columns:
            check_mapped(self._source, columns)

    def _marked(self, place: object, row: object) -> list[tuple[MarkedText, ...]]:
        """The texts of a row: of each sample, one, or the two of a preference."""
        self._rendered = place
        try:
            return self._texts(row)
        except MalformedRow as error:
            self._dropped.add(f"{place}: {error}")
            self.report = replace(
                self.report,
                malformed=self._dropped.count,
                first_malformed=self._dropped.first,
            )
            return []
        except RewrittenHistory as error:
            fix = "set `rewritten_history: split` for one sample per assistant turn"
            if isinstance(self._source, PreferenceSource):
                fix = "put all but the last turn of the assistant in `prompt`"
            raise DataError(
                f"{place}: the chat template changes {error} when other turns follow, "
                "so what would be trained is not what the model writes",
                fix=f"{fix}, or name a template that keeps the history in `data.chat_template`",
            ) from error

    def _texts(self, row: object) -> list[tuple[MarkedText, ...]]:
        if isinstance(self._source, PreferenceSource):
            pair = preference_of(row, self._source)
            self._note_reading(row, *pair)
            self._check_text(*pair)
            if pair[0] == pair[1]:
                first = self.report.first_equal or str(self._rendered)
                self.report = replace(self.report, first_equal=first)
                self._count(equal=1)
            return [tuple(self._template.mark(one, "completion") for one in pair)]
        example = conversation_of(row, self._source)
        self._note_reading(row, example)
        self._check_text(example)
        loss_on = self._source.loss_on
        try:
            return [(self._template.mark(example, loss_on),)]
        except RewrittenHistory:
            if self._source.rewritten_history == "error":
                raise
        assert isinstance(example, Conversation), "plain text has no history"
        self._count(rewritten=1)
        turns = [example.until(turn) for turn in example.trained_turns(loss_on)]
        return [(self._template.mark(turn, "last_assistant"),) for turn in turns]

    def _note_reading(self, row: object, *examples: Example) -> None:
        """Count a row whose nulls inside arguments or tools were dropped once."""
        assert isinstance(row, dict), "it was read"
        before = {column: without_nulls(value) for column, value in row.items()}
        if before == row:
            return
        chats = (one for one in examples if isinstance(one, Conversation))
        tools = [tool for chat in chats for tool in chat.tools]
        source = self._source
        if isinstance(source, PreferenceSource):
            same = preference_of(before, source) == examples
        else:
            same = (conversation_of(before, source),) == examples
        self._count(newly_read=not same or without_nulls(tools) != tools)

    def _check_text(self, *examples: Example) -> None:
        if self._special is None:
            return
        for text in (text for example in examples for text in texts_of(example)):
            if (found := self._special.search(text)) is not None:
                raise MalformedRow(
                    f"it spells out the special token {found[0]}, which would be encoded as "
                    "that token (`data.special_tokens: parse` allows it)"
                )

    def _fitted(self, sample: list[MarkedTokens]) -> list[list[MarkedTokens]]:
        """The samples, none longer than a row and each with trained tokens, made of one."""
        long = max(len(one.ids) for one in sample) > self._length
        self._count(too_long=long)
        pieces = [sample]
        if long and self._source.too_long == "drop":
            return []
        if long and self._source.too_long == "truncate":
            pieces = [[one.between(0, self._length) for one in sample]]
        elif long:
            (whole,) = sample
            # A piece begins with the last token of the one before, which predicts its next.
            starts = range(0, len(whole.ids) - 1, self._length - 1)
            pieces = [[whole.between(start, start + self._length)] for start in starts]
        kept = [piece for piece in pieces if _has_trained(piece)]
        self._count(samples=len(kept), untrained=not kept)
        self._count(cut_off=not kept and _has_trained(sample))
        return kept


def _has_trained(sample: list[MarkedTokens]) -> bool:
    """Whether each of the rows has a token that is trained, and predicted by one before it."""
    return all(one.trained[1:].any() for one in sample)


def _check_enough(
    report: ChatReport, source: ChatSource | PreferenceSource, sequence_length: int
) -> None:
    """Raise DataError if no sample is left, or most have no trained token."""
    if report.samples and report.untrained <= report.samples:
        return
    tried = report.samples + report.untrained
    fix = "check the data with `dmt data show`"
    if report.untrained:
        said = f"{report.untrained:,} of {tried:,} samples have no trained token"
        if 2 * report.cut_off >= report.untrained:
            said += (
                f"; of {report.cut_off:,} they lie behind the first {sequence_length:,} tokens"
            )
            fix = "raise `training.sequence_length`, or set `too_long: drop`"
        else:
            said += ": their conversations have no turn of the assistant that `loss_on` trains"
            fix = "check roles and `loss_on`, and the template's `{% generation %}` blocks"
    elif report.too_long:
        said = (
            f"all {report.too_long:,} conversations are longer than {sequence_length:,} tokens"
        )
        fix = "raise `training.sequence_length`, or set `too_long: truncate`"
    elif report.malformed:
        said = (
            f"all {report.malformed:,} rows are malformed (the first: {report.first_malformed})"
        )
    else:
        said = "it has no rows"
    raise DataError(f"`{source.path}`: {said}", fix=fix)
