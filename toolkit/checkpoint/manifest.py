"""The manifest of a checkpoint: its content, and how it is verified.

`manifest.json` is written last and names every file with its size and SHA-256. Its own hash is
its last entry. A folder without a manifest that matches its own hash is not a checkpoint.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from toolkit.checkpoint.validation import ValidationHistory
from toolkit.errors import CheckpointError
from toolkit.layout import Layout
from toolkit.recipe.section import Count
from toolkit.system.untrusted import parse_json, read_bytes, regular_inside

MANIFEST = "manifest.json"
FORMAT = 1
"""Incremented when a checkpoint can no longer be read by older releases."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint, as it was meant to be written."""

    size: Count
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    step: Count
    """Optimizer steps done, skipped ones included."""
    consumed_samples: Count
    """The data cursor: sequences consumed since step 0."""
    optimizer_steps: Count
    """Updates that AdamW has made, which its bias correction counts."""
    loss_scale: dict[str, Any] | None
    """The loss scaler's state under fp16."""
    recent_losses: tuple[float, ...]
    """Losses of the last steps, for spike detection."""
    data_fingerprint: str
    """Identifies the packed data that the cursor counts in."""
    engine: str
    model: str
    """Model implementation: hf or megatron."""
    layout: Layout
    recipe: dict[str, Any]
    """The run's recipe, every default written out."""
    versions: dict[str, Any]
    """Versions of the packages that wrote it."""
    consumed_tokens: Count | None = None
    """Unmasked tokens of these sequences. None if an earlier release did not count them."""
    base: str | None = None
    """For a run with adapters, the `fingerprint` of the base weights."""
    validation: ValidationHistory = field(default_factory=ValidationHistory)
    """The state after the validations up to this step, for a recipe that follows them."""
    files: dict[str, FileRecord] = field(default_factory=dict)
    """Every file by its path in the folder."""
    format: int = FORMAT

    def with_files(self, files: dict[str, FileRecord]) -> "Manifest":
        """The finished manifest."""
        return replace(self, files=dict(sorted(files.items())))

    @property
    def validation_loss(self) -> float | None:
        """Loss of these weights. None if they were saved without a validation."""
        return self.validation.loss_at(self.step)

    @property
    def precision(self) -> str:
        """The recipe's compute dtype."""
        return str(self.recipe["training"]["precision"])

    @property
    def freeze(self) -> tuple[str, ...]:
        """Patterns of the tensors that do not train, and have no moments."""
        return tuple(self.recipe["model"].get("freeze", ()))

    @property
    def optimizer(self) -> str:
        """The recipe's `optimizer.name`, which determines the states."""
        return str(self.recipe["optimizer"].get("name", "adamw"))

    @property
    def adapter(self) -> dict[str, Any] | None:
        """The recipe's `adapter`. With one, the weights that do not train are not in the
        checkpoint."""
        return self.recipe.get("adapter")

    @property
    def packages(self) -> dict[str, str]:
        """Version of DMT, Python and every package that was there."""
        stated = {name: self.versions.get(name) for name in ("dmt", "python")}
        stated |= self.versions.get("packages", {})
        return {name: str(version) for name, version in stated.items() if version is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(record.size for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write it to disk and sync."""
        content = asdict(self) | {"layout": self.layout.to_dict()}
        content["sha256"] = _digest(content)
        write_synced(folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a checkpoint's manifest. Raises CheckpointError when it is damaged."""
        path = folder / MANIFEST
        try:
            text = read_bytes(regular_inside(folder, MANIFEST)).decode()
            content = parse_json(text)
            if (found := content.get("format")) != FORMAT:
                problem = "states no format" if found is None else f"has format {found}"
                raise CheckpointError(
                    f"{path} {problem}, this release reads {FORMAT}",
                    fix="use the release that wrote it, or start again from its export",
                )
            if content.pop("sha256") != _digest(content):
                raise ValueError("it does not have the hash that it states")
            manifest = _adapter().validate_python(content)
            for name in manifest.files:
                _check_inside(name)
            return manifest
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} has no {MANIFEST}: it was never finished"
            ) from error
        except (
            OSError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error


@cache
def _adapter() -> TypeAdapter[Manifest]:
    """The type's adapter. Making one takes longer than reading a manifest."""
    return TypeAdapter(Manifest)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_inside(name: str) -> None:
    """Raise ValueError for a path that leads out of the folder."""
    if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
        raise ValueError(f"it names a file outside its folder: {name!r:.80}")


def write_synced(path: Path, content: bytes) -> FileRecord:
    """Write a small file to disk and sync it. The caller syncs its folder."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def record_of(path: Path, tick: Callable[[int], None] = lambda _: None) -> FileRecord:
    """Size and hash of a file as it is on disk. `tick` gets the bytes read. Raises OSError."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while content := file.read(_READ_BYTES):
            digest.update(content)
            size += len(content)
            tick(len(content))
    return FileRecord(size, digest.hexdigest())


def file_in(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint. Raises CheckpointError unless it is a regular one."""
    try:
        return regular_inside(folder, name)
    except OSError as error:
        raise CheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error


def size_problem(folder: Path, name: str, expected: FileRecord) -> str | None:
    """The problem of a file, judged by its size. None if there is none."""
    try:
        size = regular_inside(folder, name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if size != expected.size:
        return f"{name} has {size} bytes, it was written with {expected.size}"
    return None


def problem_with(
    folder: Path, name: str, expected: FileRecord, tick: Callable[[int], None] = lambda _: None
) -> str | None:
    """The problem of a checkpoint file. None if there is none."""
    if (problem := size_problem(folder, name, expected)) is not None:
        return problem
    try:
        if record_of(folder / name, tick) != expected:
            return f"{name} was changed: its SHA-256 is not the one in {MANIFEST}"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None
