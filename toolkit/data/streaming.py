"""Sources of text that are tokenised while a run trains on them, chunk by chunk.

A pass over a source sees its chunks in an order of its own. Consecutive chunks of that order
are a *window*: all of its samples are shuffled together. The first windows of a pass are small,
so that training begins after one chunk. Which samples a window has is known once its chunks are
tokenised; sample *i* of the source therefore needs the counts of the windows before it and
nothing else, and a checkpoint keeps the place of one window (`StreamPlace`) to continue from.
"""

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from toolkit.data.blend import JoinedSamples
from toolkit.data.chunks import Chunks, ListedFile, identities
from toolkit.data.cursor import StreamPlace
from toolkit.data.files import cache_not_writable, fingerprint_of, write_atomically
from toolkit.data.hashing import CHUNK_ORDER, WINDOW_SAMPLES, UInt64Array, derive_key
from toolkit.data.indexed import IndexedTokens, idx_path
from toolkit.data.order import permute
from toolkit.data.packing import PackedDataset
from toolkit.data.ranges import texts
from toolkit.data.rows import ENDLESS, Int64Array, Row
from toolkit.data.tokenized import CACHE_VERSION, Encoding, cached_tokens, write_tokens
from toolkit.errors import DataError
from toolkit.recipe.schema import HfSource, StreamingSection, TextSource

MIB, GIB = 2**20, 2**30
PREPARED = "prepared"
"""File in the folder of chunks that `dmt data prepare` tokenised: these are kept."""
_LOCKS = 256
"""Lock files of a source; a file for every chunk would be millions."""
_OPEN_WINDOWS = 2


@dataclass(frozen=True)
class ChunkedSource:
    """A source of text as it is tokenised; may be sent to another process."""

    source: TextSource | HfSource
    files: tuple[ListedFile, ...]
    chunk_bytes: int
    encoding: Encoding
    tokenizer: str
    """Fingerprint of the tokenizer."""
    cache: Path

    @cached_property
    def chunks(self) -> Chunks:
        """The files in chunks; documents that are files are whole."""
        whole = isinstance(self.source, TextSource)
        return Chunks(self.files, self.chunk_bytes, whole=whole)

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the files, how they are cut, and the tokenizer."""
        column = getattr(self.source, "text_field", None)
        parts = [CACHE_VERSION, self.tokenizer, self.encoding.parse_special, column]
        return fingerprint_of([*parts, self.chunk_bytes, identities(self.files)])

    @cached_property
    def folder(self) -> Path:
        """Where its tokens are kept."""
        return self.cache / "tokens" / "chunks" / self.fingerprint

    @property
    def is_bounded(self) -> bool:
        """Has it tokens in the cache that may be removed?"""
        return self.folder.is_dir() and not (self.folder / PREPARED).exists()

    def prefix(self, chunk: int) -> Path:
        """Path of a chunk's tokens, a pair of files in Megatron's indexed format."""
        return self.folder / f"{chunk:08d}"

    def lock(self, chunk: int) -> Path:
        """The lock under which the files of a chunk are written."""
        return self.folder / f"{chunk % _LOCKS}.lock"

    def tokens(self, chunk: int) -> IndexedTokens:
        """The tokens of a chunk: from the cache, or tokenised now, by this process or the one
        that is at it."""
        prefix = self.prefix(chunk)
        return cached_tokens(prefix, lambda: self._write(chunk), lock=self.lock(chunk))

    def tokenise_ahead(self, chunk: int) -> bool:
        """Tokenise a chunk, unless it is in the cache or another process is at it; whether this
        one did."""
        from filelock import FileLock, Timeout

        if idx_path(self.prefix(chunk)).exists():
            return False
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(Timeout), FileLock(self.lock(chunk)).acquire(timeout=0):
            if not idx_path(self.prefix(chunk)).exists():
                self._write(chunk)
                return True
        return False

    def _write(self, chunk: int) -> None:
        documents = (
            document for part in self.chunks[chunk] for document in texts(self.source, part)
        )
        write_tokens(self.prefix(chunk), documents, self.encoding, empty=True)


@dataclass(frozen=True)
class OpenedWindow:
    """What a run reports of a window when it reaches it."""

    source: str
    epoch: int
    window: int
    chunks: int
    samples: int
    dropped_tokens: int
    """Behind the last whole sample of each chunk."""
    seconds: float
    """How long its tokens were waited for, by the rank that reports."""


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
        """More samples than any run sees."""
        return ENDLESS

    def rows(self, index: int) -> Sequence[Row]:
        """See `Samples.rows`. Tokenises what is not tokenised yet, or waits for it."""
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
        """A window that begins at sample `index` or little before; nothing is waited for."""
        known = self._places
        return known[bisect_right(known, index, key=lambda place: place.samples) - 1]

    @property
    def beginning(self) -> PackedDataset:
        """The samples, not shuffled, of the first chunk that has any: what people look at.

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
        """The window of sample `index`; opens those before it that nobody has asked for."""
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
        """The chunks of a window."""
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
    """A window whose chunks are tokenised."""

    samples: JoinedSamples[PackedDataset]
    order: UInt64Array
    """Which of them is seen first, second, …"""


def _window_sizes(n_chunks: int, shuffled: int) -> Iterator[int]:
    """Chunks of each window of a pass: 1, 2, 4, … up to `shuffled`."""
    size = 1
    while n_chunks > 0:
        size = min(size, shuffled)
        yield min(size, n_chunks)
        n_chunks -= size
        size *= 2


class Streams:
    """The streamed sources of a run."""

    def __init__(
        self,
        parts: Sequence[StreamedSamples | None],
        counts: Callable[[int], Int64Array],
        shares: Sequence[float],
        section: StreamingSection,
    ) -> None:
        """`parts` has None for a source that is not streamed, `counts` gives the samples of
        each source among the first so many, `shares` are the largest that they ever have."""
        self.parts, self.section = tuple(parts), section
        self._counts, self._shares = counts, tuple(shares)

    @property
    def sources(self) -> list[ChunkedSource | None]:
        """What is tokenised, of each source."""
        return [None if part is None else part.source for part in self.parts]

    def places_at(self, samples: int) -> tuple[StreamPlace | None, ...]:
        """What a checkpoint of so many samples keeps of each source."""
        counts = self._counts(samples).tolist()
        return tuple(
            None if part is None else part.place_at(count)
            for part, count in zip(self.parts, counts, strict=True)
        )

    def continue_at(self, places: Sequence[StreamPlace | None]) -> None:
        """Continue from what `places_at` gave."""
        for part, place in zip(self.parts, places, strict=True):
            if part is not None and place is not None:
                part.continue_at(place)

    def report(self, listener: Callable[[OpenedWindow], object]) -> None:
        """Call `listener` with every window that is reached from here on."""
        for part in self.parts:
            if part is not None:
                part.listeners.append(listener)

    def open(self, samples: int, batch: int) -> None:
        """Tokenise, or find, the windows in which the `batch` samples begin that follow the
        first `samples`. Raises DataError as `rows` does."""
        before, behind = self._counts(samples).tolist(), self._counts(samples + batch).tolist()
        for part, index, end in zip(self.parts, before, behind, strict=True):
            if part is not None and index < end:
                part.open(index)

    def advance(self) -> list[tuple[int, int]]:
        """Source and number of the chunks that are needed next, the most urgent first.

        Removes from the cache what is passed, beyond `keep_gib`.
        """
        wanted = sorted(
            (ahead / share, source, chunk)
            for source, (part, share) in enumerate(zip(self.parts, self._shares, strict=True))
            if part is not None and share
            for ahead, chunk in part.upcoming(self.section.ahead)
        )
        # A small source may come to the same chunk again.
        chunks = list(dict.fromkeys((source, chunk) for _, source, chunk in wanted))
        self._evict(chunks)
        return chunks

    def all_chunks(self) -> list[tuple[int, int]]:
        """Source and number of every chunk. They are kept from now on: see `advance`."""
        for source in filter(None, self.sources):
            write_atomically(source.folder / PREPARED, "")
        return [
            (number, chunk)
            for number, source in enumerate(self.sources)
            for chunk in range(0 if source is None else len(source.chunks))
        ]

    def _evict(self, kept: Sequence[tuple[int, int]]) -> None:
        """Remove the oldest chunks, beyond `keep_gib`, that are neither open nor to be `kept`.

        What `dmt data prepare` tokenised stays. Raises DataError when files cannot be removed.
        """
        found: list[_Entry] = []
        try:
            for number, part in enumerate(self.parts):
                if part is not None and part.source.is_bounded:
                    needed = part.open_chunks | {c for source, c in kept if source == number}
                    found += _entries(part.source, needed)
            excess = sum(entry.nbytes for entry in found) - self.section.keep_gib * GIB
            for entry in sorted(found, key=lambda one: one.modified):
                if excess > 0 and not entry.needed:
                    entry.remove()
                    excess -= entry.nbytes
        except OSError as error:
            raise cache_not_writable(Path(error.filename or "."), error) from error


@dataclass
class _Entry:
    """The files of a chunk in the cache."""

    prefix: Path
    needed: bool
    nbytes: int = 0
    modified: float = 0.0

    def remove(self) -> None:
        """The index first: without it, the tokens are not there."""
        idx_path(self.prefix).unlink(missing_ok=True)
        for file in self.prefix.parent.glob(f"{self.prefix.name}.*"):
            file.unlink(missing_ok=True)


def _entries(source: ChunkedSource, needed: set[int]) -> Iterable[_Entry]:
    """What the folder of a source holds, by chunk."""
    found: dict[str, _Entry] = {}
    with os.scandir(source.folder) as files:
        for file in files:
            name, _, ending = file.name.partition(".")
            if ending in ("lock", ""):
                continue
            default = _Entry(source.folder / name, int(name) in needed)
            entry = found.setdefault(name, default)
            with suppress(FileNotFoundError):
                stat = file.stat()
                entry.nbytes += stat.st_size
                entry.modified = max(entry.modified, stat.st_mtime)
    return found.values()
