"""The checkpoints of a run, without reading their tensors: all of them, and the one that a path
means, which is the folder itself or the newest one of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.checkpoint.manifest import MANIFEST, Manifest, size_problem
from toolkit.checkpoint.store import LATEST, STEP, CheckpointStore, name_problem
from toolkit.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run directory."""
State = Literal["finished", "damaged", "unfinished"]
_EXPECTED = (
    "name a run directory (runs/NAME), its checkpoints folder, or one of its step-… folders"
)


@dataclass(frozen=True)
class CheckpointFolder:
    """A finished checkpoint. Its files are not verified."""

    folder: Path
    manifest: Manifest
    newest_of: Path | None
    """The folder whose newest checkpoint it is, if that folder was given."""


def locate(path: Path) -> CheckpointFolder:
    """The checkpoint that `path` means.

    `path` is a checkpoint, a run directory or the folder of its checkpoints.
    Raises CheckpointError when there is none, or when it was never finished.
    """
    if (path / MANIFEST).exists() and path.suffix != ".tmp":
        return CheckpointFolder(path, Manifest.read(path), None)
    store = store_of(path)
    finished = store.finished()
    if not finished:
        raise CheckpointError(
            f"{store.folder} holds no finished checkpoint",
            fix=f"`dmt checkpoint list {store.folder}` shows what is there",
        )
    return CheckpointFolder(finished[-1], Manifest.read(finished[-1]), store.folder)


def store_of(path: Path) -> CheckpointStore:
    """The checkpoints of a run directory, or of the folder that holds them.

    Raises CheckpointError when `path` is neither.
    """
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    store = CheckpointStore(folder, keep=1)
    if folder != path or store.expects_one():
        return store
    problem = f"is neither a run directory nor a checkpoint with its {MANIFEST}"
    if not path.exists():
        problem = "does not exist"
    raise CheckpointError(f"{path} {problem}", fix=_EXPECTED)


@dataclass(frozen=True)
class ListEntry:
    """One folder among the checkpoints."""

    folder: Path
    state: State
    """`finished` according to names and sizes, without hashing."""
    manifest: Manifest | None
    """None if it cannot be read or is unfinished."""
    nbytes: int
    """Bytes on disk."""
    modified_s: float
    """When it was last written, in seconds since 1970."""
    latest: bool
    """`latest` names it."""
    problem: str = ""
    """Why it is not finished."""


def list_checkpoints(store: CheckpointStore) -> list[ListEntry]:
    """Every checkpoint and the remains of interrupted saves, oldest step first."""
    folders = [path for path in store.folder.glob("step-????????*") if path.is_dir()]
    hint = store.folder / LATEST
    latest = hint.read_text(encoding="utf-8", errors="replace") if hint.is_file() else ""
    entries = [_entry(folder, folder.name == latest.strip()) for folder in folders]
    return sorted(entries, key=lambda entry: entry.folder)


def _entry(folder: Path, latest: bool) -> ListEntry:
    manifest, state, problem = _state_of(folder)
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    written = max([file.st_mtime for file in files], default=folder.stat().st_mtime)
    nbytes = sum(file.st_size for file in files)
    return ListEntry(folder, state, manifest, nbytes, written, latest, problem)


def _state_of(folder: Path) -> tuple[Manifest | None, State, str]:
    if not STEP.fullmatch(folder.name):
        why = "its name is not that of a checkpoint"
        if folder.name.endswith(".tmp"):
            why = "being written or removed, or left by a save that was interrupted; the next "
            why += "save removes it"
        return None, "unfinished", why
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        state: State = "damaged" if (folder / MANIFEST).exists() else "unfinished"
        return None, state, error.message
    sizes = (size_problem(folder, *item) for item in manifest.files.items())
    problem = next(filter(None, [name_problem(folder, manifest), *sizes]), "")
    return manifest, "damaged" if problem else "finished", problem
