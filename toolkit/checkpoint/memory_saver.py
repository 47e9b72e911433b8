"""Saving into the memory of the run's machines, and finding what is there after a failure.

Rank r of a machine sends its file to a rank of the next machine, which holds a copy: after the
loss of one machine, all files are still somewhere. Before a run continues, every machine gets
the files that it lacks, and its ranks load as from a disk.
"""

import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from toolkit.checkpoint.manifest import FileRecord, Manifest, size_problem
from toolkit.checkpoint.memory import (
    MemoryNote,
    MemoryStore,
    file_name,
    folder_of,
    hold,
    is_of,
    remove_unneeded,
)
from toolkit.checkpoint.saver import WRITING_TIMEOUT, Saved, Saver
from toolkit.checkpoint.store import step_of
from toolkit.checkpoint.transfer import Move, open_files, transfer
from toolkit.errors import CheckpointError
from toolkit.models.safetensors_stream import TensorToWrite
from toolkit.plan.checkpoint_size import STEPS_IN_MEMORY
from toolkit.system.compilers import file_system
from toolkit.system.failpoints import failpoint
from toolkit.text.units import GIB

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Kept:
    """A checkpoint of which every file is on some machine."""

    manifest: Manifest
    holders: dict[str, list[int]]
    """File → first ranks of the machines that have it."""


class MemorySaver(Saver):
    """Saves into, and finds checkpoints in, the memory of a run's machines.

    Creating one is collective, and so is every method. Raises CheckpointError, on every rank,
    for a folder that cannot be used.
    """

    hashes = False

    def __init__(self, run_dir: Path, base: str | None, *, asynchronous: bool) -> None:
        folder = folder_of(run_dir, base)
        self.memory = MemoryStore(folder)
        super().__init__(self.memory, asynchronous=asynchronous)
        self._group = dist.new_group(backend="gloo", timeout=WRITING_TIMEOUT)
        found = self._required(lambda: (secrets.token_hex(6), _place(folder, run_dir)))
        self._run_dir = run_dir
        self._note = MemoryNote(found[0][0], base)
        self._noted = False
        self.machines = by_machine([place for _, place in found])
        self._machine = next(one for one in self.machines if dist.get_rank() in one)
        if self.leads:
            remove_unneeded(folder.parent)

    @property
    def leads(self) -> bool:
        return dist.get_rank() == self._machine[0]

    def _required(self, action: Callable[[], Any]) -> list[Any]:
        """What all ranks returned. Raises CheckpointError, on every rank, if one failed."""
        problem, found = self._agree(action)
        if problem is not None:
            raise CheckpointError(
                f"the state cannot be kept in memory: {problem}",
                fix="name a folder on a tmpfs in checkpoint.memory.folder",
            )
        return found

    # Saving

    def check_room(self, nbytes: int) -> None:
        """Raise CheckpointError, on every rank, if a machine has no room for its part, and for
        copies, of a state of so many bytes."""
        world, copies = dist.get_world_size(), min(2, len(self.machines))
        free = self._required(lambda: _room(self.memory.folder) if self.leads else None)
        for machine in self.machines:
            needed = STEPS_IN_MEMORY * copies * nbytes * len(machine) / world
            if needed > free[machine[0]]:
                raise CheckpointError(
                    f"checkpoint.memory needs {needed / GIB:.2f} GiB at rank {machine[0]}, "
                    f"and {self.memory.folder.parent} has {free[machine[0]] / GIB:.2f} free",
                    fix="enlarge it (as root: mount -o remount,size=… /dev/shm), name a folder "
                    "on another tmpfs in checkpoint.memory.folder, or remove checkpoint.memory",
                )

    def file_of(self, rank: int) -> str:
        return file_name(rank, self._note.start)

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
            failpoint("checkpoint.exchange")
            problem = self._make(moves, folder)
            failpoint("checkpoint.exchanged")
        return problem, files

    def _make(self, moves: Sequence[Move], folder: Path) -> str | None:
        """Make these moves from and to this machine's folder; a problem of a rank."""
        opened: dict[int, Tensor] = {}
        problem, _ = self._agree(lambda: opened.update(open_files(moves, folder)))
        if problem is None:
            transfer(moves, opened, self._group, self._tick)
        return problem

    def _write(self, manifest: Manifest, *arguments: Any) -> Saved:
        """Also lets the checkpoints of this start count, from the first one on."""
        saved = super()._write(manifest, *arguments)
        if saved.problem is None and not self._noted and dist.get_rank() == 0:
            try:
                self._note.write(self._run_dir)
            except OSError as error:  # of the run directory; the next save tries again
                return replace(saved, problem=str(error))
            self._noted = True
        return saved

    # Finding

    def newest(self) -> tuple[Kept | None, list[str]]:
        """The newest checkpoint whose files are all somewhere, and why newer ones are not."""
        _, (note, *_) = self._agree(lambda: MemoryNote.read(self._run_dir))
        if note is None:
            return None, []
        _, everyones = self._agree(lambda: _held(self.memory, note.start) if self.leads else ())
        found: dict[int, Kept] = {}
        for rank, held in enumerate(everyones):
            for manifest, names in held or ():
                kept = found.setdefault(manifest.step, Kept(manifest, defaultdict(list)))
                for name in names:
                    kept.holders[name].append(rank)
        problems: list[str] = []
        for step, kept in sorted(found.items(), reverse=True):
            missing = [name for name in kept.manifest.files if name not in kept.holders]
            if not missing:
                return kept, problems
            problems.append(f"step {step} in memory: {missing[0]} is on no machine")
        return None, problems or ["nothing is left of what the run had in memory"]

    def fetch(self, kept: Kept) -> tuple[Path, str | None]:
        """This machine's folder of the checkpoint, with all files; or a problem of a rank."""
        manifest, moves = kept.manifest, missing_files(kept, self.machines)
        coming = [move.name for move in moves if move.target == dist.get_rank()]
        self.memory.newest = final = self.memory.path_of(manifest)
        folder = self.memory.partial(manifest.step) if coming else final
        problem, _ = self._agree(lambda: self._prepare(kept, folder) if coming else None)
        problem = problem or self._make(moves, folder)
        if problem is None:
            problem, _ = self._agree(
                lambda: self.memory.complete(manifest, coming) if coming else None
            )
        if problem is not None:
            self.memory.abandon(manifest.step)
        return final, problem

    def _prepare(self, kept: Kept, folder: Path) -> None:
        """A new folder with the files that this machine has."""
        self.memory.abandon(kept.manifest.step)
        folder.mkdir()
        for name, holders in kept.holders.items():
            if dist.get_rank() in holders:
                os.link(self.memory.path_of(kept.manifest) / name, folder / name)

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


def _place(folder: Path, run_dir: Path) -> Any:
    """What only ranks that share this folder, which they hold, have in common. Raises OSError
    for a folder that cannot be used."""
    if (system := file_system(folder.resolve())) != "tmpfs":
        raise OSError(f"{folder.parent} is not on a tmpfs, but on {system}")
    status = os.fstat(hold(folder, run_dir))
    return _BOOT.read_text(), status.st_dev, status.st_ino


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
