"""What a run keeps in the memory of its machines: when, and what is reported of it."""

import time
from collections.abc import Callable, Iterable
from functools import partial

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.memory_saver import Kept, MemorySaver
from toolkit.checkpoint.resume import Candidate, Found
from toolkit.checkpoint.shards import StateShard
from toolkit.train.phases import Phases

GB = 1e9


class RunMemory:
    """Saves into memory when due. Collective, except `tell` without `wait`."""

    def __init__(
        self, saver: MemorySaver, every: int, phases: Phases, warn: Callable[[str], None]
    ) -> None:
        self.saver = saver
        self.every = every
        self._phases = phases
        self._warn = warn
        self._failed = False
        """The last save failed, which is reported once."""
        self._saves, self._bytes, self._stall_s = 0, 0, 0.0

    def candidates(self) -> list[Candidate]:
        """The newest checkpoint in memory; warns of newer ones of which a part is lost."""
        kept, problems = self.saver.newest()
        for problem in problems:
            self._warn(problem)
        return [] if kept is None else [(kept.manifest.step, partial(self._fetch, kept))]

    def _fetch(self, kept: Kept) -> Found | None:
        """The checkpoint, complete on this machine; None, with a warning, if it cannot be."""
        self._phases.begin("collecting the state from memory")
        folder, problem = self.saver.fetch(kept)
        if problem is None:
            return Found(folder, kept.manifest, ())
        self._warn(f"step {kept.manifest.step} is not loaded from memory: {problem}")
        return None

    def save(self, manifest: Manifest, state: Iterable[StateShard]) -> None:
        """Start saving; the outcome of the save before was taken."""
        began = time.monotonic()
        self.saver.save(manifest, state, {})
        self._stall_s += time.monotonic() - began

    def tell(self, *, wait: bool = False) -> None:
        """Take the outcome of the save in flight, if there is one. Waiting is a phase, in which
        the watchdog hears what is written and sent."""
        began = time.monotonic()
        tick = self._phases.begin("waiting for the save into memory") if wait else None
        saved = self.saver.finished(wait=wait, tick=tick)
        self._stall_s += time.monotonic() - began
        if saved is None:
            return
        step, problem = saved.manifest.step, saved.problem or saved.complaint
        if problem is not None and not self._failed:
            self._warn(
                f"step {step} was not kept in memory, training continues: {problem}; not "
                "reported again until a step is"
            )
        self._failed = problem is not None
        self._saves += problem is None
        self._bytes = saved.manifest.nbytes or self._bytes

    def forget(self, after: int = 0) -> None:
        """Remove what is newer than a step; of 0, everything."""
        self.tell(wait=True)
        self.saver.forget(after)

    def summary(self) -> dict[str, float]:
        """Fields of a `memory` event."""
        return {
            "saves": self._saves,
            "gigabytes": round(self._bytes / GB, 6),
            "stall_s": round(self._stall_s, 3),
        }
