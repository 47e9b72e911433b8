"""The contents of a folder of checkpoints, without reading the tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.checkpoint.manifest import MANIFEST, Manifest, size_problem
from toolkit.checkpoint.store import LATEST, STEP, CheckpointStore, folder_name
from toolkit.errors import CheckpointError

State = Literal["finished", "damaged", "unfinished"]


@dataclass(frozen=True)
class Listed:
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

    @property
    def name(self) -> str:
        """The folder's name, or if its manifest states another step, the name of that step."""
        return self.folder.name if self.manifest is None else folder_name(self.manifest.step)


def overview(store: CheckpointStore) -> list[Listed]:
    """Every checkpoint and the remains of interrupted saves, oldest step first."""
    folders = [path for path in store.folder.glob("step-????????*") if path.is_dir()]
    hint = store.folder / LATEST
    latest = hint.read_text(encoding="utf-8", errors="replace") if hint.is_file() else ""
    found = [_look_at(folder, folder.name == latest.strip()) for folder in folders]
    return sorted(found, key=lambda one: (one.name, one.folder))


def _look_at(folder: Path, latest: bool) -> Listed:
    manifest, state, problem = _state_of(folder)
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    written = max([file.st_mtime for file in files], default=folder.stat().st_mtime)
    nbytes = sum(file.st_size for file in files)
    return Listed(folder, state, manifest, nbytes, written, latest, problem)


def _state_of(folder: Path) -> tuple[Manifest | None, State, str]:
    if not STEP.fullmatch(folder.name):
        return None, "unfinished", _left_by(folder.name)
    try:
        manifest = Manifest.read(folder)
    except CheckpointError as error:
        state: State = "damaged" if (folder / MANIFEST).exists() else "unfinished"
        return None, state, error.message
    problems = [size_problem(folder, *item) for item in manifest.files.items()]
    problem = next(filter(None, problems), "")
    return manifest, "damaged" if problem else "finished", problem


def _left_by(name: str) -> str:
    """The kind of a folder that does not have the name of a checkpoint."""
    if name.endswith((".old.tmp", ".replaced.tmp")):
        return "on its way out; the next save removes it"
    if name.endswith(".tmp"):
        return "being written, or left by a save that was interrupted; the next save removes it"
    return "its name is not that of a checkpoint"
