"""Verifies a checkpoint: every byte, every tensor, every element exactly once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from toolkit.checkpoint.export import COMPANIONS, check_complete
from toolkit.checkpoint.index import INDEX, index_of, read_index
from toolkit.checkpoint.manifest import MANIFEST, Manifest, problem_with
from toolkit.checkpoint.saved_state import SavedState, intersection
from toolkit.checkpoint.shards import (
    OUTER_QUANTITIES,
    block_numel,
    block_shape,
    dtype_of,
    state_quantities,
    whole_quantity,
)
from toolkit.checkpoint.store import name_problem
from toolkit.errors import CheckpointError
from toolkit.models.families.tensors import Block
from toolkit.models.frozen import matching
from toolkit.models.weights import is_correction_bias

_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}
"""safetensors' names of the types of weights and states."""


@dataclass(frozen=True)
class VerificationResult:
    """The problems and remarks about a checkpoint."""

    problems: tuple[str, ...]
    """Problems, one line each. Empty for a good checkpoint."""
    notes: tuple[str, ...]
    """Additional files, which are harmless."""


def verify(folder: Path, tick: Callable[[int], None] = lambda _: None) -> VerificationResult:
    """Hash every file, then check which elements they hold. `tick` gets the bytes read.

    Elements are checked only if the hashes match. Raises CheckpointError if there is no
    manifest to compare with.
    """
    manifest = Manifest.read(folder)
    found = [problem_with(folder, name, file, tick) for name, file in manifest.files.items()]
    problems = [*filter(None, [name_problem(folder, manifest), *found])]
    extra = sorted(_present(folder) - manifest.files.keys() - {MANIFEST})
    notes = [f"{name} is not a file of this checkpoint: it is never read" for name in extra]
    if not problems:
        problems = list(_content_problems(SavedState(folder), manifest))
    return VerificationResult(tuple(problems), tuple(notes))


def require_whole(folder: Path, tick: Callable[[int], None] = lambda _: None) -> None:
    """Raise CheckpointError, with the first problem, unless the checkpoint verifies."""
    if problems := verify(folder, tick).problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(
            f"{folder} is damaged: {problems[0]}{more}",
            fix=f"`dmt checkpoint verify {folder}` names everything; take an older checkpoint",
        )


def _present(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _content_problems(state: SavedState, manifest: Manifest) -> Iterator[str]:
    try:
        if read_index(state.folder) != index_of(state.folder, manifest.files):
            yield f"{INDEX} is not the index of its files"
        yield from coverage_problems(state, manifest.freeze, manifest.optimizer)
        if any(name.startswith(f"{COMPANIONS}/") for name in manifest.files):
            check_complete(state)
        else:
            yield f"it has no {COMPANIONS}/config.json, which says what model it is"
    except CheckpointError as error:
        yield error.message


def coverage_problems(
    state: SavedState, freeze: Sequence[str] = (), optimizer: str = "adamw"
) -> Iterator[str]:
    """Tensors whose weight or moments do not hold every element exactly once.

    Frozen tensors and correction biases have no moments. The other tensors have those of the
    optimizer of this name.
    """
    frozen = matching(freeze, state.shapes) | set(filter(is_correction_bias, state.shapes))
    for tensor, shape in state.shapes.items():
        expected = state_quantities(optimizer, tensor, shape)
        stored = state.quantities(tensor)
        outer = [one for one in OUTER_QUANTITIES if one in stored]
        if tensor in frozen and len(stored) - len(outer) > 1:
            yield f"{tensor} does not train, but has moments"
        elif more := {*stored} - {*expected, *outer}:
            yield f"{tensor} has {', '.join(sorted(more))}, which {optimizer} does not keep"
        for quantity in (*expected[: 1 if tensor in frozen else None], *outer):
            whole = whole_quantity(quantity, tensor, shape)
            parts = [*state.parts(quantity, tensor)]
            dtype = _DTYPES[dtype_of(quantity)]
            for part in parts:
                found, sizes = state.stored_form(part)
                if (found, sizes) != (dtype, block_shape(part.block)):
                    yield (
                        f"{part.file}: {part.key} holds {found} {list(sizes)}, "
                        "not what its name says"
                    )
            yield from uncovered(quantity, whole, [part.block for part in parts])
    for quantity, tensor in state.names():
        if tensor not in state.shapes:
            yield f"{quantity} of {tensor} is there, its weight is not"


def uncovered(quantity: str, whole: Block, parts: Sequence[Block]) -> Iterator[str]:
    """Rectangles that overlap or lie outside. Otherwise, whether some are missing:

    disjoint parts inside the whole with the same number of elements cover it.
    """
    reaching: list[Block] = []
    for part in sorted(parts, key=lambda block: block.rows):
        reaching = [other for other in reaching if other.rows[1] > part.rows[0]]
        if any(intersection(part, other) for other in reaching):
            yield f"{quantity} of {whole.tensor} has rows {part.rows} twice"
            return
        if intersection(part, whole) != part:
            yield f"{quantity} of {whole.tensor} has rows {part.rows} outside of its weight"
            return
        reaching.append(part)
    missing = block_numel(whole) - sum(map(block_numel, parts))
    if missing:
        numel = block_numel(whole)
        yield f"{quantity} of {whole.tensor} lacks {missing:,} of {numel:,} elements"
