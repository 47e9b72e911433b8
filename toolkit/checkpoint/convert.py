"""The same checkpoint with whole tensors in few files: for other tools, and for keeping."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from toolkit.checkpoint.index import INDEX, is_state_file
from toolkit.checkpoint.manifest import FileRecord, Manifest, file_in, write_synced
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import block_shape, dtype_of, key_of, whole_quantity
from toolkit.checkpoint.store import STEP, folder_name, sync_folder
from toolkit.errors import CheckpointError
from toolkit.models.new_folder import appearing, check_destination
from toolkit.models.safetensors_stream import (
    LARGEST_FILE_BYTES,
    TensorToWrite,
    in_files,
    write_file,
)


def check_target(src: Path, dst: Path, nbytes: int) -> None:
    """Refuse, before anything is read, a folder that cannot become the converted checkpoint.

    Raises CheckpointError, or DataError if there is not enough space.
    """
    if os.path.lexists(dst):
        raise CheckpointError(f"{dst} exists", fix="name a new folder")
    step = folder_name(Manifest.read(src).step)
    if dst.suffix == ".tmp" or (STEP.fullmatch(dst.name) and dst.name != step):
        raise CheckpointError(
            f"{dst.name} is no name for the checkpoint of {step}",
            fix=f"name it {dst.parent / step}",
        )
    check_destination(src, dst, nbytes)


def convert(
    src: Path,
    dst: Path,
    tick: Callable[[int], None] = lambda _: None,
    limit: int = LARGEST_FILE_BYTES,
) -> Manifest:
    """Write the checkpoint `src` into `dst`: whole tensors, files of at most `limit` bytes.

    A tensor larger than `limit` has its own file. Everything else is kept, so that a run can
    continue from `dst` as from `src`. A few rows of one tensor are in memory at a time. `tick`
    gets the bytes of every piece that was written. `dst` appears when it is complete. Raises
    CheckpointError for a damaged checkpoint, DataError when writing fails.
    """
    manifest, state = Manifest.read(src), SavedState(src)
    entries = [entry.telling(tick) for entry in _entries(state)]
    files: dict[str, FileRecord] = {}
    with appearing(dst) as hidden:
        files |= write_state_files(hidden, entries, limit)
        for name in manifest.files:
            if not is_state_file(name) and name != INDEX:
                files[name] = write_synced(hidden / name, file_in(src, name).read_bytes())
        for inner in {(hidden / name).parent for name in files} - {hidden}:
            sync_folder(inner)
        manifest = manifest.with_files(files)
        manifest.write(hidden)
        sync_folder(hidden)
    sync_folder(dst.absolute().parent)
    return manifest


def write_state_files(
    folder: Path, entries: Iterable[TensorToWrite], limit: int = LARGEST_FILE_BYTES
) -> dict[str, FileRecord]:
    """Write tensors of a state into files of at most `limit` bytes."""
    files = {}
    for number, content in enumerate(in_files(entries, limit)):
        name, digest = f"state-{number:05d}.safetensors", hashlib.sha256()
        write_file(folder / name, content, digest)
        files[name] = FileRecord((folder / name).stat().st_size, digest.hexdigest())
    return files


def _entries(state: SavedState) -> Iterator[TensorToWrite]:
    """Every quantity of every tensor, under the name of its whole rectangle."""
    for tensor, shape in state.shapes.items():
        for quantity in state.quantities(tensor):
            whole = whole_quantity(quantity, tensor, shape)
            yield TensorToWrite(
                key_of(quantity, whole),
                dtype_of(quantity),
                block_shape(whole),
                partial(state.in_pieces, quantity, tensor),
            )
