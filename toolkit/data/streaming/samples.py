"""The samples of a streamed source, in training order.

Each pass over a source has its own order of chunks. Consecutive chunks of that order are a
*window*: all of its samples are shuffled together. The first windows of a pass are small, so
that training begins after one chunk. The number of samples of a window is known once its chunks
are tokenised; sample *i* of the source therefore depends only on the counts of the previous
windows, and a checkpoint stores the position of one window (`StreamPlace`) to resume from.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from toolkit.data.blend import JoinedSamples
from toolkit.data.hashing import CHUNK_ORDER, WINDOW_SAMPLES, UInt64Array, derive_key
from toolkit.data.order import permute
from toolkit.data.packing import PackedDataset
from toolkit.data.rows import ENDLESS, Row
from toolkit.data.streaming.place import StreamPlace
from toolkit.data.streaming.source import ChunkedSource
from toolkit.errors import DataError

MIB = 2**20
_OPEN_WINDOWS = 2


@dataclass(frozen=True)
class OpenedWindow:
    """A run's report on a window when it reaches it."""

    source: str
    epoch: int
    window: int
    chunks: int
    samples: int
    dropped_tokens: int
    """Behind the last whole sample of each chunk."""
    seconds: float
    """Time that the reporting rank waited for its tokens."""


Pack: TypeAlias = Callable[[ChunkedSource, int], PackedDataset]
"""Gives the samples of a chunk."""


class StreamedSamples:
    """The endless samples of a source in the order in which they are seen; `Samples`.

    One thread asks for `rows`; another may ask for places meanwhile.
    """

    rows_per_sample = 1

    def __init__(
        self,
        source: ChunkedSource,
        pack: Pack,
        *,
        seed: int,
        number: int,
        shuffled: int,
        length: int,
    ) -> None:
        """`number` is the source's in its list, `shuffled` the chunks of a window."""
        self.source = source
        self.sequence_length = length
        self.listeners: list[Callable[[OpenedWindow], object]] = []
        """Called with every window that was reached."""
        self._pack, self._shuffled = pack, shuffled
        self._key = seed, number
        self._sizes = list(_window_sizes(len(source.chunks), shuffled))
        self._begins = np.cumsum([0, *self._sizes])
        self._places = [StreamPlace(0, 0, 0)]
        """Of every window from the first on that was asked for, and of the one behind."""
        self._open: dict[StreamPlace, _Window] = {}
        self._seen_chunks = 0
        """Chunks of the windows from the first of `_places` on."""
        self._reached = 0
        """The sample that was asked for last."""

    def __len__(self) -> int:
        return ENDLESS

    def rows(self, index: int) -> Sequence[Row]:
        """See `Samples.rows`. Tokenises missing chunks, or waits for them."""
        place = self._place_of(index)
        window = self._window(place)
        return window.samples.rows(int(window.order[index - place.samples]))

    def continue_at(self, place: StreamPlace) -> None:
        """Begin with the window at `place`, which `place_at` gave to a checkpoint."""
        if place.window >= len(self._sizes):
            raise DataError(
                f"the checkpoint continues `{self.source.source.title}` in window "
                f"{place.window} of {len(self._sizes)}",
                fix="restore the data files, or start in another directory (--run-dir)",
            )
        self._places, self._reached = [place], place.samples

    def open(self, index: int) -> None:
        """Tokenise, or find, the window that sample `index` is in."""
        self._place_of(index)

    def place_at(self, index: int) -> StreamPlace:
        """A window that begins at or shortly before sample `index`, without blocking."""
        known = self._places
        return known[bisect_right(known, index, key=lambda place: place.samples) - 1]

    @property
    def beginning(self) -> PackedDataset:
        """The samples, not shuffled, of the first chunk that has any, for previews.

        Raises DataError when no chunk has one.
        """
        self._place_of(0)
        places = (place for place in self._places if place.epoch == 0)
        parts = (part for place in places for part in self._window(place).samples.parts)
        return next(part for part in parts if len(part))

    def every_chunk(self) -> Iterator[PackedDataset]:
        """The samples of each chunk, tokenised now where they are not in the cache."""
        return (self._pack(self.source, chunk) for chunk in range(len(self.source.chunks)))

    def upcoming(self, windows: int) -> Iterator[tuple[float, int]]:
        """Chunks of the next windows to be opened: about how many samples come before they are
        needed, and the number of each."""
        place = self._places[-1]
        per_chunk = (place.samples - self._places[0].samples) / max(self._seen_chunks, 1) or 1.0
        ahead = float(place.samples - self._reached)
        for _ in range(windows):
            chunks = self._chunks(place)
            yield from ((ahead, chunk) for chunk in chunks)
            ahead += per_chunk * len(chunks)
            place = self._behind(place, 0)

    @property
    def open_chunks(self) -> set[int]:
        """Chunks of the windows that were opened last."""
        return {chunk for place in [*self._open] for chunk in self._chunks(place)}

    def _place_of(self, index: int) -> StreamPlace:
        """The window of sample `index`; opens previous windows that are not open yet."""
        self._reached = index
        while index >= self._places[-1].samples:
            last, began = self._places[-1], time.perf_counter()
            window = self._window(last)
            self._places.append(self._behind(last, len(window.order)))
            self._seen_chunks += len(window.samples.parts)
            self._check_pass()
            report = self._report(last, window.samples, time.perf_counter() - began)
            for listener in self.listeners:
                listener(report)
        return self.place_at(index)

    def _report(
        self, place: StreamPlace, window: JoinedSamples[PackedDataset], seconds: float
    ) -> OpenedWindow:
        return OpenedWindow(
            self.source.source.title,
            place.epoch,
            place.window,
            len(window.parts),
            len(window),
            sum(part.n_dropped for part in window.parts),
            seconds,
        )

    def _check_pass(self) -> None:
        """Raise DataError when a whole pass had no sample."""
        last = self._places[-1]
        if last.window == 0 and StreamPlace(last.epoch - 1, 0, last.samples) in self._places:
            raise DataError(
                f"`{self.source.source.title}` has no sample of {self.sequence_length:,} "
                f"tokens in any chunk of {self.source.chunk_bytes / MIB:g} MiB",
                fix="use more data, a smaller `training.sequence_length`, or a larger "
                "`data.streaming.chunk_mib`",
            )

    def _behind(self, place: StreamPlace, n_samples: int) -> StreamPlace:
        samples = place.samples + n_samples
        if place.window + 1 < len(self._sizes):
            return StreamPlace(place.epoch, place.window + 1, samples)
        return StreamPlace(place.epoch + 1, 0, samples)

    def _chunks(self, place: StreamPlace) -> list[int]:
        first, size = int(self._begins[place.window]), self._sizes[place.window]
        places = np.arange(first, first + size, dtype=np.uint64)
        key = derive_key(self._key[0], CHUNK_ORDER, place.epoch, self._key[1])
        chunks: list[int] = permute(places, len(self.source.chunks), key).tolist()
        return chunks

    def _window(self, place: StreamPlace) -> "_Window":
        found = self._open.get(place)
        if found is None:
            chunks = self._chunks(place)
            samples = JoinedSamples([self._pack(self.source, chunk) for chunk in chunks])
            seed, number = self._key
            key = derive_key(seed, WINDOW_SAMPLES, place.epoch, number, place.window)
            every = np.arange(len(samples), dtype=np.uint64)
            found = _Window(samples, permute(every, len(samples), key))
            self._open = dict([*self._open.items(), (place, found)][-_OPEN_WINDOWS:])
        return found


@dataclass(frozen=True)
class _Window:
    samples: JoinedSamples[PackedDataset]
    order: UInt64Array


def _window_sizes(n_chunks: int, shuffled: int) -> Iterator[int]:
    """Chunks of each window of a pass: 1, 2, 4, … up to `shuffled`."""
    size = 1
    while n_chunks > 0:
        size = min(size, shuffled)
        yield min(size, n_chunks)
        n_chunks -= size
        size *= 2
