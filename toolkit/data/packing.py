"""The tokens of some documents, concatenated and cut into samples of equal length."""

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from toolkit.batch import IGNORE_INDEX
from toolkit.data.fit import pack
from toolkit.data.formats.indexed import IndexedTokens
from toolkit.data.remote.blocks import BlockArray
from toolkit.data.rows import Int64Array, Row, documents, occurrences
from toolkit.data.tokenized import TokenizedData
from toolkit.errors import DataError

_CHUNK_TOKENS = 2**22
REMOTE_COUNTED_TOKENS = 2**24
"""Number of tokens of a remote store that are read to count them."""
_WINDOW_TOKENS = 2**28
"""About a quarter of a million documents."""


class TokenStream:
    """The tokens of all documents, or of a part of them, end to end and in their order.

    The chosen documents lie in the file as few or many *runs*; a stream keeps three numbers
    per run and none per document, so excluding a few documents out of many is free.
    """

    def __init__(
        self, data: TokenizedData, starts: Int64Array, stops: Int64Array, n_documents: int
    ) -> None:
        """Join the runs [start, stop) of the file; together they hold `n_documents`."""
        kept = stops > starts
        self._data = data
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

    @property
    def name(self) -> str:
        """Where the tokens lie, for messages."""
        return self._data.name

    @property
    def is_remote(self) -> bool:
        """Whether reading a token takes a network request."""
        return isinstance(self._data.indexed.tokens, BlockArray)

    def read(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        """Tokens `start … stop - 1`, int64 [stop - start], and which end a document.

        The second array holds the places, counted from `start`, of the last tokens of
        documents.
        """
        tokens = self._data.indexed.tokens
        pieces = self._pieces(start, stop)
        read = np.concatenate([tokens[first:behind] for first, behind, _ in pieces])
        return read.astype(np.int64), self.document_ends(start, stop)

    def beginning(self) -> Iterator[tuple[Int64Array, Int64Array]]:
        """What `read` gives, piece by piece, of all tokens; of a remote store, the first."""
        n_tokens = min(len(self), REMOTE_COUNTED_TOKENS) if self.is_remote else len(self)
        for start in range(0, n_tokens, _CHUNK_TOKENS):
            yield self.read(start, min(start + _CHUNK_TOKENS, n_tokens))

    def document_lengths(self, n_tokens: int) -> Int64Array:
        """Tokens of each document that ends in the first so many tokens, from the index."""
        ends = [np.array([-1])]
        for start in range(0, n_tokens, _CHUNK_TOKENS):
            ends.append(self.document_ends(start, min(start + _CHUNK_TOKENS, n_tokens)) + start)
        return np.diff(np.concatenate(ends))

    def expect(self, start: int, stop: int) -> None:
        """Prefetch tokens that `read` will return, from a remote store."""
        tokens = self._data.indexed.tokens
        assert isinstance(tokens, BlockArray)
        for first, behind, _ in self._pieces(start, stop):
            tokens.expect(first, behind)

    def document_ends(self, start: int, stop: int) -> Int64Array:
        """The second array of `read`, without reading the tokens."""
        ends = [
            self._document_ends(first, behind) - first + place
            for first, behind, place in self._pieces(start, stop)
        ]
        return np.concatenate(ends)

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
        indexed = self._data.indexed
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


class PackedDataset:
    """Samples of `sequence_length` inputs, each with the token that follows as its label.

    Sample i covers tokens [i·L, i·L + L] of the stream: inputs are the first L of them,
    labels the last L. An incomplete sample at the end is dropped. Where the input is the
    last token of a document, the label is `IGNORE_INDEX`: the next document is not predicted.
    Where documents are isolated, a row has segments and positions; a document that began in the
    sample before counts from 0 again.
    """

    rows_per_sample = 1

    def __init__(
        self,
        stream: TokenStream,
        sequence_length: int,
        vocab_size: int | None = None,
        *,
        isolate_documents: bool = False,
    ) -> None:
        """`vocab_size`, where given, is the model's; tokens outside it are an error."""
        self.stream = stream
        self.sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._isolates = isolate_documents

    def __len__(self) -> int:
        return max(0, (len(self.stream) - 1) // self.sequence_length)

    @property
    def n_documents(self) -> int:
        """Number of documents, parts of which may lie in several samples."""
        return self.stream.n_documents

    @property
    def n_tokens(self) -> int:
        """Tokens of the documents; the last of them may be in no sample."""
        return len(self.stream)

    def rows(self, index: int) -> tuple[Row]:
        """See `Samples.rows`: one row.

        Raises DataError when a token lies outside the model's vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        length, at = self.sequence_length, 0
        inputs = np.zeros(length, dtype=np.int64)
        labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
        starts = [np.array([0])]
        for start, size in self._parts(index):
            tokens, ends = self.stream.read(start, min(start + size + 1, len(self.stream)))
            self._check_vocabulary(tokens)
            ends = at + ends[ends < size]
            inputs[at : at + size] = tokens[:size]
            labels[at : at + len(tokens) - 1] = tokens[1:]
            labels[ends] = IGNORE_INDEX
            at += size
            starts += [ends + 1, np.array([at])]
        if not self._isolates:
            return (Row(inputs, labels),)
        segments, positions = documents(np.unique(np.concatenate(starts)), length)
        return (Row(inputs, labels, positions=positions, segments=segments),)

    @property
    def n_dropped(self) -> int:
        """Tokens behind the last sample."""
        return len(self.stream) - len(self) * self.sequence_length

    def expect(self, indices: Int64Array) -> None:
        for index in indices.tolist() if self.stream.is_remote else ():
            for start, size in self._parts(index):
                self.stream.expect(start, min(start + size + 1, len(self.stream)))

    def _parts(self, index: int) -> list[list[int]]:
        """Start in the stream and tokens of each part of sample `index`."""
        return [[index * self.sequence_length, self.sequence_length]]

    def filled(self, index: int) -> int:
        """Positions of sample `index` before its padding."""
        return sum(size for _, size in self._parts(index))

    def _check_vocabulary(self, tokens: Int64Array) -> None:
        # Only data that DMT did not tokenise itself can fail here. Without the check the
        # embedding fails, on a GPU far from the cause.
        low, high = int(tokens.min()), int(tokens.max())
        if self._vocab_size is not None and not 0 <= low <= high < self._vocab_size:
            raise DataError(
                f"{self.stream.name} holds token ids from {low} to {high}; the model has "
                f"{self._vocab_size} tokens",
                fix="use data made with the model's tokenizer",
            )

    def token_counts(self) -> Int64Array:
        """How often each token id occurs in the stream, int64 [largest id + 1]; of tokens in a
        remote store, in its beginning."""

        def checked() -> Iterator[Int64Array]:
            for tokens, _ in self.stream.beginning():
                self._check_vocabulary(tokens)
                yield tokens

        return occurrences(checked())


class FittedDataset(PackedDataset):
    """Samples of whole documents, as many as fit, padded at the end; best fit decreasing.

    A document longer than a sample is cut: its whole samples stand alone, and only what is
    left of it shares one ("Fewer Truncations Improve Language Modeling", arXiv:2404.10830).
    The last token of a cut part has the token that follows in its document as label.
    """

    def __init__(
        self,
        stream: TokenStream,
        rows: IndexedTokens,
        sequence_length: int,
        vocab_size: int | None = None,
        *,
        isolate_documents: bool = False,
    ) -> None:
        """`rows` is what `fitted_rows` found for the stream and this length."""
        super().__init__(
            stream, sequence_length, vocab_size, isolate_documents=isolate_documents
        )
        self._rows = rows

    def __len__(self) -> int:
        return self._rows.n_documents

    @property
    def n_dropped(self) -> int:
        """None: samples are padded."""
        return 0

    def _parts(self, index: int) -> list[list[int]]:
        first, behind = self._rows.document_starts(np.array([index, index + 1])).tolist()
        parts: list[list[int]] = self._rows.tokens[first:behind].reshape(-1, 2).tolist()
        return parts


def fitted_rows(stream: TokenStream, length: int) -> Iterator[Int64Array]:
    """The rows of a `FittedDataset`: of each part of a document, its start in the stream and
    its tokens, int64 [parts · 2].

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
    parts = np.stack([(starts + sizes - rest)[left], rest[left]], axis=1)
    for row in pack(rest[left], length):
        yield parts[row].reshape(-1)
