"""All streamed sources of a run: their checkpointed positions, the chunks to tokenise next, and
eviction from the cache."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from toolkit.data.files import cache_not_writable, write_cached
from toolkit.data.formats.indexed import idx_path
from toolkit.data.rows import Int64Array
from toolkit.data.streaming.place import StreamPlace
from toolkit.data.streaming.samples import OpenedWindow, StreamedSamples
from toolkit.data.streaming.source import PREPARED, ChunkedSource
from toolkit.recipe.schema import StreamingSection
from toolkit.text.units import GIB


class Streams:
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
        """The position of each source after this many samples, for a checkpoint."""
        counts = self._counts(samples).tolist()
        return tuple(
            None if part is None else part.place_at(count)
            for part, count in zip(self.parts, counts, strict=True)
        )

    def continue_at(self, places: Sequence[StreamPlace | None]) -> None:
        """Resume from the result of `places_at`."""
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

        Evicts chunks of completed steps beyond `keep_gib` from the cache.
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
            write_cached(source.folder / PREPARED, "")
        return [
            (number, chunk)
            for number, source in enumerate(self.sources)
            for chunk in range(0 if source is None else len(source.chunks))
        ]

    def _evict(self, kept: Sequence[tuple[int, int]]) -> None:
        """Remove the oldest chunks, beyond `keep_gib`, that are neither open nor to be `kept`.

        The output of `dmt data prepare` stays. Raises DataError if files cannot be removed.
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
