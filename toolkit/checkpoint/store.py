"""The checkpoints under one folder: listing, committing and removing them.

`step-N.tmp` is a checkpoint that is being written. Nobody reads it. When all of it is on disk
rank 0 renames it to `step-N`. A kill at any moment leaves the whole checkpoint or a `.tmp`
folder. `latest` names the newest one for people and scripts. It is only used here to detect
that a checkpoint once existed.
"""

import os
import re
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

from toolkit.checkpoint.index import INDEX, write_index
from toolkit.checkpoint.manifest import MANIFEST, Manifest
from toolkit.checkpoint.validation import lowest
from toolkit.errors import CheckpointError
from toolkit.system.atomic import write_atomically
from toolkit.system.failpoints import failpoint

LATEST = "latest"
STEP = re.compile(r"step-(\d{8})")
"""Name of a checkpoint's folder."""


def folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step that a folder of `CheckpointStore.finished` is named after."""
    return int(folder.name.removeprefix("step-"))


def name_problem(folder: Path, manifest: Manifest) -> str:
    """The problem of a checkpoint under the name of another step. Empty if there is none."""
    name = folder_name(manifest.step)
    if STEP.fullmatch(folder.name) and folder.name != name:
        return f"it is the checkpoint of step {manifest.step}: rename it to {name}"
    return ""


def quarantine(folder: Path, reason: str) -> None:
    """Rename a checkpoint to `step-N.REASON`: it is neither counted nor read again.

    An earlier one of that name stays. Raises OSError.
    """
    names = (f"{folder.name}.{reason}{number or ''}" for number in count())
    free = next(path for name in names if not (path := folder.with_name(name)).exists())
    folder.rename(free)


class CheckpointStore:
    """The checkpoints of a run. `keep` of the newest stay, and `keep_best` of those with the
    lowest validation loss. Not collective: rank 0's work."""

    def __init__(self, folder: Path, keep: int, keep_best: int = 0) -> None:
        self.folder = folder
        self.keep = keep
        self.keep_best = keep_best

    def finished(self) -> list[Path]:
        """Finished folders, oldest step first, not verified."""
        folders = sorted(self.folder.glob("step-*"))
        return [path for path in folders if STEP.fullmatch(path.name) and path.is_dir()]

    def newest_step(self) -> int:
        """The step of the newest finished checkpoint that has a manifest. 0 without one."""
        folders = [path for path in self.finished() if (path / MANIFEST).exists()]
        return max(map(step_of, folders), default=0)

    def of_step(self, step: int) -> Path:
        """The folder of the finished checkpoint of a step."""
        return self.folder / folder_name(step)

    def best(self, count: int = 1, until: int | None = None) -> set[int]:
        """Steps of the finished checkpoints with the lowest validation loss, up to step
        `until`. Empty where none has one."""
        losses = []
        for folder in self.finished():
            with suppress(CheckpointError):  # a damaged one is no candidate
                if until is None or step_of(folder) <= until:
                    losses.append((Manifest.read(folder).validation_loss, step_of(folder)))
        return lowest(losses, count)

    def expects_one(self) -> bool:
        """Whether a checkpoint was ever finished here."""
        return (self.folder / LATEST).exists() or bool(self.finished())

    def partial(self, step: int) -> Path:
        """The folder that the checkpoint of `step` is written into."""
        return self.folder / f"{folder_name(step)}.tmp"

    def begin(self, step: int) -> None:
        """Prepare for a new checkpoint: remove interrupted ones."""
        self._remove_leftovers()
        partial = self.partial(step)
        if partial.exists():
            raise FileExistsError(f"{partial} is there and cannot be removed")
        partial.mkdir(parents=True)

    def abandon(self, step: int) -> None:
        """Remove the files of a failed checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def commit(self, manifest: Manifest) -> str | None:
        """Turn a completely written folder into a checkpoint. Then remove the oldest.

        Returns a problem that occurred after the commit. Before that, raises OSError or
        CheckpointError.
        """
        partial = self.partial(manifest.step)
        final = self.of_step(manifest.step)
        failpoint("checkpoint.hashed")
        index = write_index(partial, manifest.files)
        manifest.with_files(manifest.files | {INDEX: index}).write(partial)
        sync_folder(partial)
        failpoint("checkpoint.manifest")
        if final.exists():
            # It is damaged, could not be set aside, and the run reached this step again.
            final.rename(final.with_name(f"{final.name}.replaced.tmp"))
        partial.rename(final)
        try:
            failpoint("checkpoint.renamed")
            sync_folder(self.folder)
            write_atomically(self.folder / LATEST, f"{final.name}\n")
            failpoint("checkpoint.latest")
            self._prune(manifest.step)
        except OSError as error:
            return str(error)
        return None

    def restate(self, manifest: Manifest) -> None:
        """Replace the manifest of the finished checkpoint of its step, whose files stay. At
        every moment one of the two is there. Then remove the oldest. Raises OSError."""
        step = manifest.step
        self.begin(step)
        manifest.write(self.partial(step))
        folder = self.of_step(step)
        (self.partial(step) / MANIFEST).replace(folder / MANIFEST)
        sync_folder(folder)
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """Remove all but the newest `keep` and the best. Steps after `newest` are not
        touched."""
        until_now = [path for path in self.finished() if step_of(path) <= newest]
        best = self.best(self.keep_best, newest) if self.keep_best else set()
        for old in until_now[: -self.keep]:
            if step_of(old) in best:
                continue
            # Renamed first, so that no reader sees a partly removed folder.
            leaving = old.with_name(f"{old.name}.old.tmp")
            old.rename(leaving)
            failpoint("checkpoint.prune")
            shutil.rmtree(leaving, ignore_errors=True)
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove a folder. What cannot be removed (NFS keeps open files) is harmless."""
        for leftover in self.folder.glob("step-*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
            with suppress(OSError):
                leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
