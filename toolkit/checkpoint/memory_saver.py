"""Saving into the memory of the run's machines, and finding what is there after a failure.

Rank r of a machine sends its file to a rank of the next machine, which holds a copy: after the
loss of one machine, all files are still somewhere. Before a run continues, every machine gets
the files that it lacks, and its ranks load as from a disk.
"""

import os
import shutil
import stat
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.checkpoint.manifest import FileRecord, Manifest, size_problem
from toolkit.checkpoint.memory import (
    KEPT,
    MemoryNote,
    MemoryStore,
    file_name,
    folder_of,
    is_of,
    new_start,
)
from toolkit.checkpoint.saver import WRITING_TIMEOUT, Saved, Saver
from toolkit.checkpoint.store import step_of
from toolkit.checkpoint.transfer import Move, transfer
from toolkit.errors import CheckpointError
from toolkit.models.safetensors_stream import TensorToWrite
from toolkit.system.failpoints import failpoint
from toolkit.text.units import GIB

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Kept:
    """A checkpoint of which every file is on some machine."""

    manifest: Manifest
    holders: Mapping[str, Sequence[int]]
    """File → first ranks of the machines that have it."""


class MemorySaver(Saver):
    """Saves into, and finds checkpoints in, the memory of a run's machines.

    Creating one is collective, and so is every method. Raises CheckpointError, on every rank,
    for a folder that cannot be used.
    """

    hashes = False

    def __init__(self, run_dir: Path, base: str | None, *, asynchronous: bool) -> None:
        folder = folder_of(run_dir, base)
        super().__init__(MemoryStore(folder), asynchronous=asynchronous)
        self._group = dist.new_group(backend="gloo", timeout=WRITING_TIMEOUT)
        self._note = MemoryNote(new_start(), base)
        self._noted = False
        self._run_dir = run_dir
        found = self._from_all((self._note.start, *_identity(folder)))
        self.start: str = found[0][0]
        for rank, (_, place, problem) in enumerate(found):
            if place is None:
                raise CheckpointError(
                    f"rank {rank} cannot keep its state in memory: {problem}",
                    fix="name a folder on a tmpfs in checkpoint.memory.folder",
                )
        self.machines = by_machine([place for _, place, _ in found])
        self._machine = next(one for one in self.machines if dist.get_rank() in one)

    @property
    def memory(self) -> MemoryStore:
        """Its store."""
        assert isinstance(self.store, MemoryStore)
        return self.store

    @property
    def leads(self) -> bool:
        return dist.get_rank() == self._machine[0]

    def _from_all(self, mine: Any) -> list[Any]:
        """What every rank has."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._group)
        return found

    # Saving

    def check_room(self, nbytes: int) -> None:
        """Raise CheckpointError, on every rank, if a machine has no room for its part, and for
        copies, of a state of so many bytes."""
        world, copies = dist.get_world_size(), min(2, len(self.machines))
        free = self._from_all(_room(self.memory.folder) if self.leads else None)
        for machine in self.machines:
            needed = KEPT * copies * nbytes * len(machine) / world
            if needed > free[machine[0]]:
                raise CheckpointError(
                    f"checkpoint.memory needs {needed / GIB:.2f} GiB at rank {machine[0]}, "
                    f"and {self.memory.folder.parent} has {free[machine[0]] / GIB:.2f} free",
                    fix="enlarge it (as root: mount -o remount,size=… /dev/shm), name a folder "
                    "on another tmpfs in checkpoint.memory.folder, or remove checkpoint.memory",
                )

    def file_of(self, rank: int) -> str:
        return file_name(rank, self.start)

    def _write_all(
        self, folder: Path, entries: list[TensorToWrite], companions: Mapping[str, bytes]
    ) -> tuple[str | None, dict[str, FileRecord]]:
        """Write this rank's file, then exchange files with other machines."""
        problem, files = super()._write_all(folder, entries, companions)
        if problem is None and len(self.machines) > 1:
            moves = [
                Move(name, files[name].size, rank, partner)
                for rank, partner in partners(self.machines).items()
                for name in (self.file_of(rank),)
            ]
            problem, _ = self._agree(lambda: self._exchange(moves, folder))
        return problem, files

    def _exchange(self, moves: Sequence[Move], folder: Path) -> None:
        failpoint("checkpoint.exchange")
        transfer(moves, folder, self._group, len(moves))
        failpoint("checkpoint.exchanged")

    def _write(self, manifest: Manifest, *arguments: Any) -> Saved:
        """Also lets the checkpoints of this start count, from the first one on."""
        saved = super()._write(manifest, *arguments)
        if saved.problem is None and not self._noted and dist.get_rank() == 0:
            try:
                MemoryNote(self.start, self._note.folder).write(self._run_dir)
            except OSError as error:  # of the run directory; the next save tries again
                return replace(saved, problem=str(error))
            self._noted = True
        return saved

    # Finding

    def newest(self) -> tuple[Kept | None, list[str]]:
        """The newest checkpoint whose files are all somewhere, and why newer ones are not."""
        note = MemoryNote.read(self._run_dir) if dist.get_rank() == 0 else None
        start = self._from_all(None if note is None else note.start)[0]
        mine = _held(self.memory, start) if start and self.leads else []
        manifests: dict[tuple[int, tuple[str, ...]], Manifest] = {}
        holders: dict[tuple[int, tuple[str, ...]], dict[str, list[int]]] = {}
        for rank, held in enumerate(self._from_all(mine)):
            for manifest, names in held:
                key = manifest.step, tuple(manifest.files)
                manifests[key] = manifest
                having = holders.setdefault(key, defaultdict(list))
                for name in names:
                    having[name].append(rank)
        problems: list[str] = []
        for key in sorted(manifests, reverse=True):
            missing = [name for name in manifests[key].files if name not in holders[key]]
            if not missing:
                return Kept(manifests[key], holders[key]), problems
            problems.append(f"step {key[0]} in memory: {missing[0]} is on no machine")
        if start and not problems:
            problems.append("nothing is left of what the run had in memory")
        return None, problems

    def fetch(self, kept: Kept) -> tuple[Path, str | None]:
        """This machine's folder of the checkpoint, with all files; or a problem of a rank."""
        manifest, moves = kept.manifest, missing_files(kept, self.machines)
        coming = [move for move in moves if move.target == dist.get_rank()]
        partial = self.memory.partial(manifest.step)
        folder = partial if coming else self.memory.path_of(manifest)
        problem, _ = self._agree(lambda: self._prepare(kept, coming) if coming else None)
        if problem is None:
            problem, _ = self._agree(lambda: transfer(moves, folder, self._group, at_once=1))
        if problem is None:
            problem, _ = self._agree(
                lambda: (
                    self.memory.complete(manifest, [move.name for move in coming])
                    if coming
                    else None
                )
            )
        if problem is not None:
            self.memory.abandon(manifest.step)
        self.memory.newest = self.memory.path_of(manifest)
        return self.memory.newest, problem

    def _prepare(self, kept: Kept, coming: Sequence[Move]) -> None:
        """A new folder with the files that this machine has."""
        folder, step = self.memory.folder, kept.manifest.step
        needed = sum(move.size for move in coming)
        if needed > (free := _room(folder)):
            raise OSError(f"{folder} has {free:,} bytes left, the state needs {needed:,} more")
        self.memory.abandon(step)
        self.memory.partial(step).mkdir()
        for name, holders in kept.holders.items():
            if dist.get_rank() in holders:
                path = self.memory.path_of(kept.manifest) / name
                os.link(path, self.memory.partial(step) / name)

    def forget(self, after: int = 0) -> None:
        """Remove what is newer than this step; of 0, all that the run has in memory."""
        if self.leads:
            for folder in self.memory.finished():
                if step_of(folder) > after:
                    shutil.rmtree(folder, ignore_errors=True)
            if not after:
                shutil.rmtree(self.memory.folder, ignore_errors=True)


def missing_files(kept: Kept, machines: Sequence[Sequence[int]]) -> list[Move]:
    """What the machines lack of a checkpoint, each file from one that has it."""
    return [
        Move(name, record.size, holders[number % len(holders)], machine[0])
        for number, (name, record) in enumerate(kept.manifest.files.items())
        for holders in (kept.holders[name],)
        for machine in machines
        if machine[0] not in holders
    ]


def by_machine(places: Sequence[Any]) -> list[list[int]]:
    """The ranks of each machine, given where each rank is."""
    machines: dict[Any, list[int]] = {}
    for rank, place in enumerate(places):
        machines.setdefault(place, []).append(rank)
    return list(machines.values())


def partners(machines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Rank → the rank of the next machine that holds a copy of its file; machines may have
    different numbers of ranks."""
    return {
        rank: following[index % len(following)]
        for machine, following in zip(machines, [*machines[1:], machines[0]], strict=True)
        for index, rank in enumerate(machine)
    }


def _identity(folder: Path) -> tuple[Any, str]:
    """What only ranks that share this folder have in common; or None, and the problem."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(f"{folder} is a link, or another user's")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
        return (_BOOT.read_text(), status.st_dev, status.st_ino), ""
    except OSError as error:
        return None, str(error)


def _room(folder: Path) -> float:
    """Bytes that are free, or used by a folder."""
    used = sum(path.stat().st_blocks for path in folder.rglob("*") if path.is_file())
    return shutil.disk_usage(folder).free + 512 * used


def _held(store: MemoryStore, start: str) -> list[tuple[Manifest, list[str]]]:
    """Checkpoints of this start of the run, and which of their files this machine has."""
    found = []
    for folder in store.finished():
        with suppress(CheckpointError):  # of a manifest that cannot be read: not one of it
            manifest = Manifest.read(folder)
            files = manifest.files.items()
            if all(is_of(name, start) for name in manifest.files):
                names = [name for name, one in files if not size_problem(folder, name, one)]
                found.append((manifest, names))
    return found
