"""Which checkpoint a path means: the folder itself, or the newest one of a run."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.checkpoint.manifest import MANIFEST, Manifest
from toolkit.checkpoint.store import STEP, CheckpointStore
from toolkit.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run directory."""


@dataclass(frozen=True)
class Located:
    """A finished checkpoint; its files are not verified."""

    folder: Path
    manifest: Manifest
    newest_of: Path | None
    """The folder whose newest checkpoint it is, if that folder was given."""


def locate(path: Path) -> Located:
    """The checkpoint that `path` means.

    `path` is a checkpoint, a run directory or the folder of its checkpoints.
    Raises CheckpointError when there is none, or when it was never finished.
    """
    if path.name.endswith(".tmp"):
        raise CheckpointError(
            f"{path} is what an interrupted save left, no checkpoint",
            fix=f"`dmt checkpoint list {path.parent}` shows the finished ones",
        )
    if (path / MANIFEST).exists():
        return Located(path, Manifest.read(path), None)
    store = store_of(path)
    finished = store.finished()
    if not finished:
        raise CheckpointError(
            f"{store.folder} holds no finished checkpoint",
            fix=f"`dmt checkpoint list {store.folder}` shows what is there",
        )
    return Located(finished[-1], Manifest.read(finished[-1]), store.folder)


def store_of(path: Path) -> CheckpointStore:
    """The checkpoints of a run directory, or of the folder that holds them.

    Raises CheckpointError when `path` is neither.
    """
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    store = CheckpointStore(folder, keep=1)
    if folder != path or store.expects_one():
        return store
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
    elif STEP.fullmatch(path.name):
        problem = f"has no {MANIFEST}: it was never finished, or an older release wrote it"
    else:
        problem = "is neither a checkpoint nor a run directory"
    raise CheckpointError(f"{path} {problem}", fix=_EXPECTED)


_EXPECTED = (
    "name a run directory (runs/NAME), its checkpoints folder, or one of its step-… folders"
)
