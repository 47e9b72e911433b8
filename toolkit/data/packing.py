"""Samples of equal length, whose rows are made of parts of a token stream."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from toolkit.batch import IGNORE_INDEX
from toolkit.data.indexed import IndexedTokens
from toolkit.data.rows import Int64Array, MarkedTokens, Row, documents
from toolkit.data.tokenized import TokenizedData
from toolkit.errors import DataError

_PADDING_ID = 0
"""Valid in every vocabulary. It is never a label, and no trained token attends to it."""
_WINDOW_TOKENS = 2**28
"""About a quarter of a million documents."""


class TokenStream:
    """The tokens of all documents, or of a part of them, end to end and in their order.

    The chosen documents lie in the file as few or many *runs*. A stream keeps three numbers
    per run and none per document, so excluding a few documents out of many is free.
    """

    def __init__(
        self, data: TokenizedData, starts: Int64Array, stops: Int64Array, n_documents: int
    ) -> None:
        """Join the runs [start, stop) of the file. Together they hold `n_documents`."""
        kept = stops > starts
        self.data = data
        self.n_documents = n_documents
        self._starts, self._stops = starts[kept], stops[kept]
        # Position in the stream of the first token of each run, and behind the last one.
        self._at = np.concatenate([[0], np.cumsum(self._stops - self._starts)])

    @classmethod
    def whole(cls, data: TokenizedData) -> "TokenStream":
        return cls.without(data, np.zeros(0, dtype=np.int64))

    @classmethod
    def only(cls, data: TokenizedData, documents: Int64Array) -> "TokenStream":
        """The given documents (ascending numbers)."""
        starts, stops = _bounds(data, documents)
        return cls(data, starts, stops, len(documents))

    @classmethod
    def without(cls, data: TokenizedData, documents: Int64Array) -> "TokenStream":
        """All documents but the given ones (ascending numbers)."""
        starts, stops = _bounds(data, documents)
        n_left = data.indexed.n_documents - len(documents)
        return cls(
            data, np.append([0], stops), np.append(starts, len(data.indexed.tokens)), n_left
        )

    def __len__(self) -> int:
        return int(self._at[-1])

    def read(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Stored tokens `start … stop - 1`, int64 [stop - start], and which end a document.

        The second array holds the places, counted from `start`, of the last tokens of
        documents.
        """
        tokens = self.data.indexed.tokens
        pieces = self._pieces(start, stop)
        read = np.concatenate([tokens[first:behind] for first, behind, _ in pieces])
        return read.astype(np.int64), self.document_ends(start, stop)

    def document_lengths(self, n_tokens: int) -> Int64Array:
        """Tokens of each document that ends in the first so many tokens, from the index."""
        return np.diff(self.document_ends(0, n_tokens), prepend=-1)

    def document_ends(self, start: int, stop: int) -> Int64Array:
        """The second array of `read`, without reading the tokens."""
        ends = [
            self._document_ends(first, behind) - first + place
            for first, behind, place in self._pieces(start, stop)
        ]
        return np.concatenate(ends or [np.zeros(0, dtype=np.int64)])

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts of runs that make up [start, stop): file positions, and the place."""
        first_run = int(np.searchsorted(self._at, start, side="right")) - 1
        behind_run = int(np.searchsorted(self._at, stop, side="left"))
        for run in range(first_run, behind_run):
            shift = int(self._starts[run] - self._at[run])
            first = max(start + shift, int(self._starts[run]))
            behind = min(stop + shift, int(self._stops[run]))
            yield first, behind, first - shift - start

    def _document_ends(self, first: int, behind: int) -> Int64Array:
        """File positions, within [first, behind), of the last tokens of documents."""
        indexed = self.data.indexed
        itemsize = indexed.tokens.itemsize
        # A document ends where the next one starts.
        low = bisect_right(indexed.document_offsets, first * itemsize)
        high = bisect_right(indexed.document_offsets, behind * itemsize)
        ends = indexed.document_offsets[low:high] // itemsize - 1
        if behind == len(indexed.tokens):  # where the last document ends, none starts
            ends = np.append(ends, behind - 1)
        return ends


def _bounds(data: TokenizedData, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
    """First token of each document, and the position behind its last one."""
    return data.indexed.document_starts(documents), data.indexed.document_starts(documents + 1)


Part = tuple[int, int]
"""Start in the stream, and tokens."""


@dataclass(frozen=True)
class RowParts:
    """Which tokens of a stream lie in each row of a data set."""

    n_rows: int
    of: Callable[[int], list[Part]]
    """The parts of a row, in their order. The row is padded behind them."""

    @classmethod
    def equal(cls, stream: TokenStream, length: int) -> "RowParts":
        """The stream cut at every `length` tokens. Each row needs the token that follows, as a
        label: an incomplete one at the end is dropped."""
        return cls(max(0, (len(stream) - 1) // length), lambda row: [(row * length, length)])

    @classmethod
    def documents(cls, stream: TokenStream) -> "RowParts":
        """A row for each document."""
        lengths = stream.document_lengths(len(stream))
        starts = np.cumsum(lengths) - lengths
        return cls(len(lengths), lambda row: [(int(starts[row]), int(lengths[row]))])

    @classmethod
    def stored(cls, rows: IndexedTokens) -> "RowParts":
        """The result of `fitted_rows` or `packed_rows` for the stream."""

        def parts(row: int) -> list[Part]:
            first, behind = rows.document_starts(np.array([row, row + 1])).tolist()
            flat = rows.tokens[first:behind].tolist()
            return list(zip(flat[::2], flat[1::2], strict=True))

        return cls(rows.n_documents, parts)


class StreamSamples:
    """Samples whose rows are parts of a token stream, and padding behind them.

    The label of a token is the token that follows it in the stream, or `IGNORE_INDEX` where
    that one is not trained or belongs to the next document. Where documents are isolated, a row
    has segments and positions: a segment for each document and one for the padding. A document
    that began in the row before counts from 0 again.
    """

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        parts: RowParts | None = None,
        *,
        rows_per_sample: int = 1,
        vocab_size: int | None = None,
        isolates: bool = False,
    ) -> None:
        """`parts` are those of each row, by default `RowParts.equal`. `vocab_size`, where
        given, is the model's. Tokens outside it are an error."""
        self.stream = stream
        self.sequence_length = sequence_length
        self.rows_per_sample = rows_per_sample
        self._parts = parts or RowParts.equal(stream, sequence_length)
        self._vocab_size = vocab_size
        self._isolates = isolates

    def __len__(self) -> int:
        return self._parts.n_rows // self.rows_per_sample

    def rows(self, index: int) -> list[Row]:
        """See `Samples.rows`.

        Raises DataError when a token lies outside the model's vocabulary.
        """
        return [self._row(parts) for parts in self._rows_of(index)]

    def documents(self, index: int) -> list[MarkedTokens]:
        """The documents of sample `index`, as far as they lie in it."""
        found = []
        for start, size in (part for parts in self._rows_of(index) for part in parts):
            tokens, ends = self._read(start, start + size)
            bounds = [0, *(ends[ends < size - 1] + 1).tolist(), size]
            found += [tokens.between(first, end) for first, end in pairwise(bounds)]
        return found

    def _rows_of(self, index: int) -> list[list[Part]]:
        """The parts of each row of sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = index * self.rows_per_sample
        return [self._parts.of(row) for row in range(first, first + self.rows_per_sample)]

    def _row(self, parts: list[Part]) -> Row:
        length, at = self.sequence_length, 0
        inputs = np.full(length, _PADDING_ID, dtype=np.int64)
        labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
        starts = [np.array([0])]
        for start, size in parts:
            tokens, ends = self._read(start, start + size + 1)
            following = np.where(tokens.trained, tokens.ids, IGNORE_INDEX)[1:]
            ends = at + ends[ends < size]
            inputs[at : at + size] = tokens.ids[:size]
            labels[at : at + len(following)] = following
            labels[ends] = IGNORE_INDEX
            at += size
            starts += [ends + 1, np.array([at])]
        if not self._isolates:
            return Row(inputs, labels)
        segments, positions = documents(np.unique(np.concatenate(starts)), length)
        return Row(inputs, labels, positions=positions, segments=segments)

    def _read(self, start: int, stop: int) -> tuple[MarkedTokens, Int64Array]:
        """Tokens `start … stop - 1` as far as there are any. The second as of
        `TokenStream.read`."""
        stored, ends = self.stream.read(start, min(stop, len(self.stream)))
        trained = stored >= 0
        marked = self.stream.data.row_numbers is not None
        ids = np.where(trained, stored, ~stored) if marked else stored
        # Only data that DMT did not tokenise itself can fail here. Without the check the
        # embedding fails, on a GPU far from the cause.
        low, high = int(ids.min()), int(ids.max())
        if self._vocab_size is not None and not 0 <= low <= high < self._vocab_size:
            raise DataError(
                f"{self.stream.data.name} holds token ids from {low} to {high}; the model has "
                f"{self._vocab_size} tokens",
                fix="use data made with the model's tokenizer",
            )
        return MarkedTokens(ids, trained), ends


def packed_rows(stream: TokenStream, length: int) -> Iterator[Int64Array]:
    """Rows of whole documents, none longer than `length`: of each row, start in the stream and
    tokens of its documents, int64 [documents · 2]."""
    lengths = stream.document_lengths(len(stream))
    yield from _packed(np.cumsum(lengths) - lengths, lengths, length)


def fitted_rows(stream: TokenStream, length: int) -> Iterator[Int64Array]:
    """Rows as of `packed_rows`, of documents of any length. A longer one is cut: its whole rows
    stand alone, and only what is left of it shares one ("Fewer Truncations Improve Language
    Modeling", arXiv:2404.10830).

    Documents are fitted a window of the stream at a time: memory does not grow with it.
    """
    start = 0  # of the first document that is not in a row
    for low in range(0, len(stream), _WINDOW_TOKENS):
        high = min(low + _WINDOW_TOKENS, len(stream))
        ends = low + stream.document_ends(low, high) + 1
        if len(ends):
            yield from _fitted(np.concatenate([[start], ends]), length)
            start = int(ends[-1])


def _fitted(bounds: Int64Array, length: int) -> Iterator[Int64Array]:
    """The rows of the documents between `bounds`."""
    starts, sizes = bounds[:-1], np.diff(bounds)
    whole = np.repeat(starts, sizes // length)
    counts = np.concatenate([np.arange(n) for n in sizes // length if n] or [starts[:0]])
    for first in (whole + counts * length).tolist():
        yield np.array([first, length])
    rest = sizes % length
    left = np.flatnonzero(rest)
    yield from _packed((starts + sizes - rest)[left], rest[left], length)


def _packed(starts: Int64Array, sizes: Int64Array, length: int) -> Iterator[Int64Array]:
    parts = np.stack([starts, sizes], axis=1)
    for row in pack(sizes, length):
        yield parts[row].reshape(-1)


def pack(lengths: Int64Array, capacity: int) -> list[list[int]]:
    """Rows of whole items, at most `capacity` tokens each: numbers of items, ascending.

    `lengths` are the tokens of each item, from 1 to `capacity`. Best fit decreasing: from the
    longest to the shortest, each item is put into the fullest row that has room for it. The
    result depends on the lengths alone. Rows are in the order of their first items.
    """
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    """Rows by the number of tokens that are left in them."""
    rooms: list[int] = []
    """The numbers of tokens that are left in some row, ascending."""
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room, row = capacity, len(rows)
            rows.append([])
        else:
            room = rooms[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        rows[row].append(item)
        left = room - length
        if left:
            if not with_room[left]:
                insort(rooms, left)
            with_room[left].append(row)
    return sorted(sorted(row) for row in rows)
