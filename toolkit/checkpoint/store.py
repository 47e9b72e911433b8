"""Checkpoints of a run: a folder is one only when it is complete.

Every rank writes into `step-N.tmp`; when all are done, rank 0 adds the manifest and
renames the folder to `step-N`. A kill at any moment leaves either the whole checkpoint
or a `.tmp` folder that nobody reads.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from toolkit.errors import CheckpointError
from toolkit.plan.layout import Layout

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    """Optimizer steps done."""
    consumed_samples: int
    """The data cursor: sequences consumed since step 0."""
    data_fingerprint: str
    """Identifies the packed data that the cursor counts in."""
    engine: str
    model: str
    """Model implementation: hf or megatron."""
    layout: Layout

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a checkpoint's manifest. Raises CheckpointError when it is damaged."""
        try:
            data: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            return cls(**{**data, "layout": Layout(**data["layout"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{folder / MANIFEST} is damaged: {error}",
                fix=f"move {folder} away to continue from the checkpoint before it",
            ) from error


class CheckpointStore:
    """The checkpoints under one folder. Every method is collective unless it says otherwise."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def save(self, manifest: Manifest, write_state: Callable[[Path], None]) -> Path:
        """Write a checkpoint; `write_state(folder)` writes each rank's share.

        Older checkpoints are removed only after the new one is complete.
        """
        final = self.folder / f"step-{manifest.step:08d}"
        partial = final.with_suffix(".tmp")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        write_state(partial)
        dist.barrier()
        if dist.get_rank() == 0:
            text = json.dumps(asdict(manifest), indent=2) + "\n"
            (partial / MANIFEST).write_text(text, encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            for old in self.complete()[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()
        return final

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first. Not collective."""
        return sorted(path.parent for path in self.folder.glob(f"step-????????/{MANIFEST}"))

    def newest(self) -> Path | None:
        """The newest complete checkpoint as rank 0 sees it, the same on every rank."""
        found: list[str | None] = [None]
        if dist.get_rank() == 0 and (checkpoints := self.complete()):
            found = [str(checkpoints[-1])]
        dist.broadcast_object_list(found)
        return Path(found[0]) if found[0] else None


def check_fits(
    manifest: Manifest, folder: Path, engine: str, model: str, layout: Layout
) -> None:
    """Refuse a checkpoint that this engine and layout cannot read.

    Raises CheckpointError naming what differs. The micro batch may differ: it changes
    how a global batch is computed, not what is stored.
    """
    then, now = asdict(manifest.layout), asdict(layout)
    free = {"micro_batch", "gradient_accumulation", "recompute"}
    differing = [
        f"{key} was {then[key]}, is {now[key]}"
        for key in then
        if key not in free and then[key] != now[key]
    ]
    if (manifest.engine, manifest.model) != (engine, model):
        written = f"{manifest.engine} with model {manifest.model}"
        differing.insert(0, f"engine was {written}, is {engine} with model {model}")
    if differing:
        raise CheckpointError(
            f"{folder} was written under another layout: {'; '.join(differing)}",
            fix="resume with the same layout, or start a new run from the exported weights "
            "(model.init: pretrained)",
        )
