"""Checkpoints in the memory of a run's machines: where they are, and which of them count.

They are ordinary checkpoints in a folder on a tmpfs, so they outlive the ranks and their
launcher. A machine holds the files of its own ranks and copies of those of another machine
(`memory_saver.py`). The run directory names the start of the run whose checkpoints count; the
names of their files contain it. So a machine that was away contributes nothing outdated, and
another run in the same place finds nothing.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import ClassVar

from pydantic import TypeAdapter

from toolkit.checkpoint.manifest import Manifest, write_synced
from toolkit.checkpoint.store import CheckpointStore, folder_name, step_of
from toolkit.plan.checkpoint_size import STEPS_IN_MEMORY
from toolkit.system.untrusted import read_json

SHARED_MEMORY = Path("/dev/shm")
_RUN = "run"
"""A link to the run directory, in the run's folder."""


@dataclass(frozen=True)
class MemoryNote:
    """`memory.json` of a run directory."""

    FILE: ClassVar = "memory.json"

    start: str
    """Identifies the start of the run that saved last."""
    folder: str | None
    """`checkpoint.memory.folder` of its recipe."""

    def write(self, run_dir: Path) -> None:
        """Replace the run's note. Raises OSError."""
        new = run_dir / f".{self.FILE}.tmp"
        write_synced(new, json.dumps(asdict(self)).encode())
        new.replace(run_dir / self.FILE)

    @classmethod
    def read(cls, run_dir: Path) -> "MemoryNote | None":
        """The run's note; None without a readable one."""
        try:
            return _NOTE.validate_python(read_json(run_dir / cls.FILE))
        except (OSError, ValueError):
            return None


_NOTE = TypeAdapter(MemoryNote)


def file_name(rank: int, start: str) -> str:
    """The file with a rank's state, saved by a start of the run."""
    return f"state-{rank:05d}-{start}.safetensors"


def is_of(name: str, start: str) -> bool:
    """Whether a file is one of this start."""
    return name.endswith(f"-{start}.safetensors")


def folder_of(run_dir: Path, base: str | None) -> Path:
    """The run's folder on this machine, under the folder `base` of its recipe."""
    place = os.fsencode(run_dir.absolute())
    name = f"dmt-{run_dir.name[:100]}-{hashlib.sha256(place).hexdigest()[:12]}"
    return (SHARED_MEMORY if base is None else Path(base)) / f"{name}-{socket.gethostname()}"


def hold(folder: Path, run_dir: Path) -> int:
    """Make a run's folder, which names the run, and lock it as long as the result, a
    descriptor, is open. Raises OSError."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = _own(folder)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_there(descriptor):
            break
        os.close(descriptor)  # `remove_unneeded` was faster
    with suppress(FileExistsError):
        (folder / _RUN).symlink_to(run_dir.absolute())
    return descriptor


def _own(folder: Path) -> int:
    """A descriptor of this user's folder. Raises OSError for links and folders of others, who
    know which names are used in /dev/shm."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if os.fstat(descriptor).st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's")
    return descriptor


def _is_there(descriptor: int) -> bool:
    """Whether a folder was not removed before it was locked."""
    return os.fstat(descriptor).st_nlink > 0


def remove_unneeded(base: Path) -> None:
    """Remove this machine's folders that nobody holds and of which nothing counts: their runs
    ended on other machines, or their run directories were removed."""
    for folder in base.glob(f"dmt-*-{'[0-9a-f]' * 12}-{escape(socket.gethostname())}"):
        with suppress(OSError), ExitStack() as at_end:  # held, another user's, or gone
            at_end.callback(os.close, descriptor := _own(folder))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            run_dir = (folder / _RUN).readlink()
            mounted = any(run_dir.parent.iterdir())  # a place to mount a disk at is empty
            counts = (run_dir / MemoryNote.FILE).exists()
            if mounted and not counts and _is_there(descriptor):
                shutil.rmtree(folder)


def newest_kept(run_dir: Path) -> int:
    """The newest step that this machine has at least a part of, and that counts; else 0."""
    note = MemoryNote.read(run_dir)
    if note is None:
        return 0
    folders = MemoryStore(folder_of(run_dir, note.folder)).finished()
    mine = [folder for folder in folders if any(folder.glob(f"state-*-{note.start}.*"))]
    return step_of(mine[-1]) if mine else 0


class MemoryStore(CheckpointStore):
    """The part of a run's checkpoints that is in this machine's memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, STEPS_IN_MEMORY)
        self.newest: Path | None = None
        """The checkpoint that was committed or loaded last: what else is there is outdated."""
        self.visiting: tuple[str, ...] = ()
        """Files of the newest that came from other machines so that it could be loaded."""

    def begin(self, step: int) -> None:
        """See `CheckpointStore.begin`. Before it takes room, what is outdated leaves it."""
        for folder in self.finished():
            if folder != self.newest:
                shutil.rmtree(folder)
        if self.newest is not None:
            for name in self.visiting:
                (self.newest / name).unlink(missing_ok=True)
        self.visiting = ()
        super().begin(step)

    def commit(self, manifest: Manifest) -> str | None:
        """See `CheckpointStore.commit`."""
        complaint = super().commit(manifest)
        self.newest = self.path_of(manifest)
        return complaint

    def path_of(self, manifest: Manifest) -> Path:
        """Where the checkpoint of this manifest is, or will be."""
        return self.folder / folder_name(manifest.step)

    def complete(self, manifest: Manifest, visiting: Sequence[str]) -> None:
        """Let the partial folder of a step, which has all files now, replace the finished one.
        `visiting`: see above."""
        super().commit(manifest)
        self.visiting = tuple(visiting)
