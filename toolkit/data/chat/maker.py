"""Makes stored samples of rows: parsed, rendered, tokenised and cut.

A stored sample is a list of token ids. A token that is not trained is stored as the bitwise
complement of its id, which is negative. A preference is two such samples.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from toolkit.data.chat.conversations import (
    Conversation,
    Example,
    MalformedRow,
    PlainText,
    check_dropped,
    examples_of,
    template_keys,
    texts_of,
    unread_columns,
)
from toolkit.data.chat.report import ChatReport
from toolkit.data.chat.template import (
    ChatTemplate,
    MarkedText,
    RewrittenHistory,
)
from toolkit.data.rows import Int64Array, MarkedTokens
from toolkit.errors import DataError
from toolkit.recipe.schema import ChatSource, PreferenceSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LIMIT_S = 30.0
"""Limit of CPU time for a row: a chat template is a program of others, which may never end."""
_NOTHING: tuple[Any, ...] = (None, "", [], {})
"""Values of a column that nothing reads whose loss means nothing."""
Batch: TypeAlias = list[tuple[int, object, object]]
"""Rows: their number in the data set, place and value."""
_Texts: TypeAlias = tuple[int, tuple[MarkedText, ...]]
"""A sample before it is tokenised: number of its row, and texts."""


@dataclass(frozen=True)
class SampleBatch:
    """The samples of a batch."""

    stored: list[tuple[int, Int64Array]]
    """The number of its row, and [tokens]."""
    report: ChatReport


class SampleMaker:
    """Makes samples of rows. May be sent to another process."""

    def __init__(
        self,
        source: ChatSource | PreferenceSource,
        tokenizer: "PreTrainedTokenizerFast",
        sequence_length: int,
        *,
        parse_special: bool,
    ) -> None:
        """`parse_special`: rows may spell out special tokens."""
        self._source = source
        self._template = ChatTemplate(tokenizer.chat_template, tokenizer)
        self._special = None if parse_special else self._template.special
        self._length = sequence_length
        self._report = ChatReport()
        """On the batch that is being made."""

    def __call__(self, batch: Batch) -> SampleBatch:
        """The samples of a batch. Raises DataError for a malformed row, unless such are
        dropped."""
        report = self._report = ChatReport(rows=len(batch))
        columns, keys, rendered = dict[str, None](), dict[str, None](), list[_Texts]()
        for number, place, row in batch:
            try:
                examples = self._parsed(row)
                with _limited(place):
                    samples = self._marked(place, examples)
            except MalformedRow as error:
                found = f"{place}: {error}"
                check_dropped(self._source, found)
                report.malformed += 1
                report.first_malformed = report.first_malformed or found
            else:
                rendered += [(number, texts) for texts in samples]
                columns |= dict.fromkeys(self._unread(row))
                keys |= {key: None for one in examples for key in template_keys(one)}
        stored = list(self._stored(rendered))
        report.unread_columns = tuple(columns)
        report.unread_keys = tuple(key for key in keys if not self._template.reads(key))
        return SampleBatch(stored, report)

    def _parsed(self, row: object) -> tuple[Example, ...]:
        """`examples_of` the row, which spell out no special token unless they may."""
        examples = examples_of(row, self._source)
        if self._special is not None:
            for text in (text for example in examples for text in texts_of(example)):
                if (found := self._special.search(text)) is not None:
                    raise MalformedRow(
                        f"it spells out the special token {found[0]}, which would be encoded "
                        "as that token (`data.special_tokens: parse` allows it)"
                    )
        return examples

    def _marked(
        self, place: object, examples: tuple[Example, ...]
    ) -> list[tuple[MarkedText, ...]]:
        """The texts of each sample of a row: one, or the two of a preference."""
        source, first = self._source, examples[0]
        self._report.plain += isinstance(first, PlainText)
        loss_on = "completion" if isinstance(source, PreferenceSource) else source.loss_on
        try:
            return [tuple(self._template.mark(one, loss_on) for one in examples)]
        except RewrittenHistory as error:
            fix = "set `rewritten_history: split` for one sample per assistant turn"
            if isinstance(source, PreferenceSource):
                fix = "put all but the last turn of the assistant in `prompt`"
            elif source.rewritten_history == "split":
                assert isinstance(first, Conversation), "plain text has no history"
                self._report.rewritten += 1
                turns = [first.until(turn) for turn in first.trained_turns(loss_on)]
                return [(self._template.mark(turn, "last_assistant"),) for turn in turns]
            raise DataError(
                f"{place}: the chat template changes {error} when other turns follow, "
                "so what would be trained is not what the model writes",
                fix=f"{fix}, or name a template that keeps the history in `data.chat_template`",
            ) from error

    def _unread(self, row: object) -> list[str]:
        """Columns of a row that nothing reads, and that are not empty."""
        assert isinstance(row, dict), "it was parsed"
        names = unread_columns(self._source, row)
        return [name for name in names if row[name] not in _NOTHING]

    def _stored(self, rendered: list[_Texts]) -> Iterator[tuple[int, Int64Array]]:
        """Stored samples, each with the number of its row."""
        tokens = iter(self._template.encode([text for _, one in rendered for text in one]))
        for number, texts in rendered:
            sample = [next(tokens) for _ in texts]
            for piece in self._fitted(sample):
                for marked in piece:
                    self._report.tokens += len(marked.ids)
                    self._report.trained_tokens += int(marked.trained[1:].sum())
                    yield number, np.where(marked.trained, marked.ids, ~marked.ids)

    def _fitted(self, sample: list[MarkedTokens]) -> list[list[MarkedTokens]]:
        """The samples, none longer than a row and each with trained tokens, made of one."""
        long = max(len(one.ids) for one in sample) > self._length
        self._report.too_long += long
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
        self._report.samples += len(kept)
        self._report.untrained += not kept
        return kept


@contextmanager
def _limited(place: object) -> Iterator[None]:
    """In the main thread: raise DataError after `LIMIT_S` seconds of CPU time."""

    def end(*_: object) -> None:
        raise DataError(
            f"{place}: the chat template takes more than {LIMIT_S:g} s of CPU time for it",
            fix="correct the row, or name another template in `data.chat_template`",
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)


def _has_trained(sample: list[MarkedTokens]) -> bool:
    """Whether each of the rows has a token that is trained, and predicted by one before it."""
    return all(one.trained[1:].any() for one in sample)
