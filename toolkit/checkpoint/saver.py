"""Saving on all ranks: every rank writes its own file, and they are committed together or not
at all (`store.commit`).

Training stops only while a rank copies its state to host memory. Writing, hashing and
committing happen in a thread, which communicates by messages: of collectives in one group, two
threads would mix the order. One save is in flight at most. The next one waits for it.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.checkpoint.copies import HostCopies
from toolkit.checkpoint.manifest import FileRecord, Manifest, write_synced
from toolkit.checkpoint.shards import (
    StateShard,
    block_shape,
    dtype_of,
    key_of,
    stored_values,
    with_offsets,
)
from toolkit.checkpoint.store import CheckpointStore, sync_folder
from toolkit.errors import CheckpointError
from toolkit.models.families.tensors import Block
from toolkit.models.safetensors import TensorToWrite, write_file
from toolkit.system.failpoints import failpoint


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, the same on every rank."""

    manifest: Manifest
    """The manifest, with the files of all ranks. Without any if the save failed."""
    seconds: float
    """Seconds from the start until it was on disk."""
    problem: str | None
    """Why there is no checkpoint. None if there is one."""
    complaint: str | None = None
    """Problems after the commit: the hint `latest`, or the removal of old checkpoints."""


class Saver:
    """Writes checkpoints into a store. Creating one is collective, and so is every method.

    `group`: gloo, of all ranks, in which nobody else sends messages. None: the default one.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        asynchronous: bool,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.store = store
        self.asynchronous = asynchronous
        self._group = group
        self._copies = HostCopies()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[SaveOutcome] | None = None

    def save(
        self,
        manifest: Manifest,
        state: Iterable[StateShard],
        companions: Mapping[str, bytes],
    ) -> None:
        """Save `state`, and on rank 0 the `companions`: paths in the folder, and contents.

        Of a run with adapters, only what trains. Returns when the state may change again.
        `finished` returns how it ended.
        """
        assert self._in_flight is None, "take the last one's outcome first"
        began = time.monotonic()
        failpoint("checkpoint.begin")
        if manifest.adapter is not None:
            state = (shard for shard in state if shard.trains)
        copies = self._copies if self.asynchronous else None
        entries = list(entries_of(state, copies))
        copied = self._copies.end()
        failpoint("checkpoint.copied")
        self._in_flight = self._thread.submit(
            self._write, manifest, entries, companions, began, copied
        )
        if not self.asynchronous:
            self._in_flight.exception()  # waits

    def finished(self, *, wait: bool = False) -> SaveOutcome | None:
        """The outcome of the save in flight, once. None while it runs or without one.

        Unless it waits, ranks see it at different times.
        """
        if self._in_flight is None or not (wait or self._in_flight.done()):
            return None
        saved = self._in_flight.result()
        self._in_flight = None
        return saved

    def close(self) -> None:
        """End the thread. The last outcome was taken."""
        self._thread.shutdown()

    def _write(
        self,
        manifest: Manifest,
        entries: list[TensorToWrite],
        companions: Mapping[str, bytes],
        began: float,
        copied: Callable[[], None],
    ) -> SaveOutcome:
        """Write, gather, commit. In the thread."""
        leader = dist.get_rank() == 0

        def begin() -> None:
            copied()
            if leader:
                self.store.begin(manifest.step)

        problem = self._agree(begin)[0]
        files: dict[str, FileRecord] = {}
        if problem is None:
            folder = self.store.partial(manifest.step)
            problem, found = self._agree(lambda: self._write_own(folder, entries, companions))
            files = {name: file for part in found for name, file in (part or {}).items()}
        entries.clear()
        manifest = manifest.with_files(files)
        complaint = None
        if problem is None:
            problem, (complaint, *_) = self._agree(
                lambda: self.store.commit(manifest) if leader else None
            )
        if problem is not None and leader:
            self.store.abandon(manifest.step)
        return SaveOutcome(manifest, time.monotonic() - began, problem, complaint)

    def _write_own(
        self, folder: Path, entries: list[TensorToWrite], companions: Mapping[str, bytes]
    ) -> dict[str, FileRecord]:
        """Write this rank's files to disk and sync. Returns their records."""
        failpoint("checkpoint.write")
        records = write_state(folder, dist.get_rank(), entries)
        failpoint("checkpoint.written")
        return records | (write_companions(folder, companions) if dist.get_rank() == 0 else {})

    def _agree(self, action: Callable[[], Any]) -> tuple[str | None, list[Any]]:
        """Run `action` on every rank. The first rank's problem, and what all returned."""
        problem, result = None, None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - the other ranks wait for the answer
            problem = f"rank {dist.get_rank()}: {error}"
        outcomes = self._of_all_ranks((problem, result))
        first = next((error for error, _ in outcomes if error is not None), None)
        return first, [made for _, made in outcomes]

    def _of_all_ranks(self, mine: Any) -> list[Any]:
        """The values of all ranks. Rank 0 collects them and sends them out."""
        box = [mine]
        others = range(1, dist.get_world_size())
        if dist.get_rank() == 0:
            collected = [mine]
            for rank in others:
                dist.recv_object_list(box, rank, group=self._group)
                collected += box
            for rank in others:
                dist.send_object_list([collected], rank, group=self._group)
            return collected
        dist.send_object_list(box, 0, group=self._group)
        dist.recv_object_list(box, 0, group=self._group)
        return list(box[0])


def write_state(
    folder: Path, number: int, entries: Iterable[TensorToWrite]
) -> dict[str, FileRecord]:
    """Write a file of tensors to disk and sync. Raises OSError."""
    path, digest = folder / f"state-{number:05d}.safetensors", hashlib.sha256()
    try:
        write_file(path, entries, digest)
    except OSError:
        # Other ranks may write for minutes: leave space for the run's other files.
        path.unlink(missing_ok=True)
        raise
    return {path.name: FileRecord(path.stat().st_size, digest.hexdigest())}


def write_companions(folder: Path, companions: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write other files, by their paths in the folder, to disk and sync. Raises OSError."""
    records = {path: write_synced(folder / path, text) for path, text in companions.items()}
    for inner in {(folder / path).parent for path in companions}:
        sync_folder(inner)
    return records


def entries_of(
    state: Iterable[StateShard], copies: HostCopies | None = None
) -> Iterable[TensorToWrite]:
    """The tensors that this rank writes. They are copies, which outlive the next training step,
    or are taken from the engine when their turn comes."""
    for shard in state:
        if not shard.saved_here:
            continue
        for quantity in shard.quantities:
            values: Callable[[], Tensor] = partial(shard.get, quantity)
            if copies is not None:
                kept = copies.of(values()) if shard.in_memory else values()
                values = partial(Tensor.detach, kept)
            for block, offset in with_offsets(shard.blocks):
                pieces = partial(_pieces, values, quantity, block, offset)
                key, shape = key_of(quantity, block.stored), block_shape(block.stored)
                yield TensorToWrite(key, dtype_of(quantity), shape, pieces)


def _pieces(
    values: Callable[[], Tensor], quantity: str, block: Block, offset: int
) -> list[Tensor]:
    """The values of a block on the host."""
    flat = values()
    assert flat.dtype == dtype_of(quantity), "master weights and moments are fp32"
    name = f"{quantity} of {block.tensor}"
    return [_finite(stored_values(block, offset, flat), name).cpu()]


def _finite(values: Tensor, name: str) -> Tensor:
    """The same values. Raises CheckpointError for a state that cannot be trained on."""
    # A sum is several times faster than a check of each; it may also overflow for finite
    # values.
    if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
        raise CheckpointError(
            f"weights or moments are not finite, this is not saved: {name} has NaN or infinity"
        )
    return values
