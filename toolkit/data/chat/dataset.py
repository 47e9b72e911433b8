"""Stored chats as samples: rows of equal length, packed or not, and pairs of rows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from toolkit.batch import IGNORE_INDEX
from toolkit.data.chat.template import MarkedTokens
from toolkit.data.chat.tokens import StoredChats
from toolkit.data.files import fingerprint_of
from toolkit.data.fit import pack
from toolkit.data.formats.indexed import IndexedTokens
from toolkit.data.rows import Int64Array, Row, documents, occurrences
from toolkit.data.split import held_out_documents
from toolkit.data.tokenized import cached_rows

_PADDING_ID = 0
"""Padding token id, valid in every vocabulary; it is never a label, and no trained token
attends to it."""
_COUNTED_AT_ONCE = 4096
"""Conversations."""


class ChatSamples:
    """Samples of conversations; see `Samples`.

    A row of one conversation is padded at its end, where no token attends to the padding. A
    packed row has `segments` and `positions`: a segment per conversation, one for the padding.
    """

    def __init__(
        self,
        chats: StoredChats,
        numbers: Int64Array,
        sequence_length: int,
        rows_per_sample: int = 1,
        packed: IndexedTokens | None = None,
        *,
        isolates: bool = False,
    ) -> None:
        """Of `chats`, the stored rows `numbers`, ascending; a sample of two is two of them.

        `packed`: which of `numbers`, by index, share a row. `isolates`: rows of one
        conversation also have the format of packed ones.
        """
        self.chats = chats
        self.sequence_length = sequence_length
        self.rows_per_sample = rows_per_sample
        self._numbers = numbers
        self._packed = packed
        self._isolates = isolates or packed is not None

    def __len__(self) -> int:
        if self._packed is not None:
            return self._packed.n_documents
        return len(self._numbers) // self.rows_per_sample

    @property
    def n_documents(self) -> int:
        """Number of conversations, or of answers in preferences."""
        return len(self._numbers)

    @property
    def n_tokens(self) -> int:
        """Tokens without padding."""
        return int(self.lengths().sum())

    def lengths(self) -> Int64Array:
        """Tokens of each conversation, int64 [n_documents]."""
        return self.chats.lengths()[self._numbers]

    def rows(self, index: int) -> list[Row]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        chats = self.conversations(index)
        rows = [[chat] for chat in chats] if self._packed is None else [chats]
        return [*map(self._isolated_row if self._isolates else self._row, rows)]

    def conversations(self, index: int) -> list[MarkedTokens]:
        return [self.chats.read(number) for number in self.stored_rows(index).tolist()]

    def stored_rows(self, index: int) -> Int64Array:
        """Which rows of the store make up sample `index`."""
        if self._packed is None:
            first = index * self.rows_per_sample
            return self._numbers[first : first + self.rows_per_sample]
        bounds = self._packed.document_starts(np.array([index, index + 1]))
        rows: Int64Array = self._packed.tokens[bounds[0] : bounds[1]]
        return self._numbers[rows]

    def token_counts(self) -> Int64Array:
        """How often each token id is trained, int64 [largest id + 1]."""
        starts = range(0, len(self._numbers), _COUNTED_AT_ONCE)
        return occurrences(
            self._trained(self._numbers[at : at + _COUNTED_AT_ONCE]) for at in starts
        )

    def _trained(self, numbers: Int64Array) -> Int64Array:
        chats = map(self.chats.read, numbers.tolist())
        return np.concatenate([chat.ids[1:][chat.trained[1:]] for chat in chats])

    def _row(self, chats: Sequence[MarkedTokens]) -> Row:
        """Concatenated conversations, and padding."""
        input_ids = np.full(self.sequence_length, _PADDING_ID, dtype=np.int64)
        labels = np.full(self.sequence_length, IGNORE_INDEX, dtype=np.int64)
        at = 0
        for chat in chats:
            end = at + len(chat.ids)
            input_ids[at:end] = chat.ids
            labels[at : end - 1] = np.where(chat.trained[1:], chat.ids[1:], IGNORE_INDEX)
            at = end
        return Row(input_ids, labels)

    def _isolated_row(self, chats: Sequence[MarkedTokens]) -> Row:
        row = self._row(chats)
        # Padding starts where the last conversation ends.
        starts = np.cumsum([0, *(len(chat.ids) for chat in chats)], dtype=np.int64)
        segments, positions = documents(starts, self.sequence_length)
        return Row(row.input_ids, row.labels, positions=positions, segments=segments)


def chat_samples(
    chats: StoredChats,
    numbers: Int64Array,
    part: str,
    *,
    sequence_length: int,
    rows_per_sample: int,
    packing: str,
    cache: Path,
    isolates: bool = False,
) -> ChatSamples:
    """Samples of the stored rows `numbers`; which of them share a row is kept in the cache.

    `part` says which part of `chats` they are. `isolates`: see `ChatSamples`.
    """
    if packing != "greedy":
        return ChatSamples(chats, numbers, sequence_length, rows_per_sample, isolates=isolates)
    lengths = chats.lengths()[numbers]
    prefix = cache / "tokens" / fingerprint_of([chats.fingerprint, "packed rows", part])
    packed = cached_rows(prefix, np.int32, lambda: pack(lengths, sequence_length))
    return ChatSamples(chats, numbers, sequence_length, packed=packed)


def split_rows(chats: StoredChats, fraction: float, seed: int) -> tuple[Int64Array, Int64Array]:
    """Stored rows to train on and those held out: whole rows of the data set, by the seed."""
    sources, row_of = np.unique(chats.source_rows(), return_inverse=True)
    held_out = np.zeros(len(sources), dtype=np.bool_)
    held_out[held_out_documents(len(sources), fraction, seed)] = True
    return np.flatnonzero(~held_out[row_of]), np.flatnonzero(held_out[row_of])
