"""What `dmt checkpoint inspect` shows of a checkpoint."""

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.cli.output import Table
from toolkit.plan.dimensions import layout_text
from toolkit.text.units import byte_size, human

_WEIGHT_BYTES, _STATE_BYTES = 4, 3 * 4
"""Per parameter: the weight, and with two moments, in fp32."""


class Held(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    pieces: int
    """Rectangles in which its weight is stored."""
    trained: bool
    """Whether it has moments."""


def contents(folder: Path) -> list[Held]:
    """Every tensor of a checkpoint. Raises CheckpointError for files that are damaged."""
    state = SavedState(folder)
    return [
        Held(name, shape, len([*state.parts("weight", name)]), len(state.quantities(name)) > 1)
        for name, shape in state.shapes.items()
    ]


def facts(manifest: Manifest, held: Sequence[Held]) -> Iterator[tuple[str, str]]:
    """What the manifest says, in words."""
    recipe, training = manifest.recipe, manifest.recipe["training"]
    yield "recipe", str(recipe["name"])
    yield "step", f"{manifest.step:,}, of which {manifest.optimizer_steps:,} made an update"
    stage = manifest.lengths.stage_of(max(manifest.step - 1, 0))
    length = stage.sequence_length
    counted = manifest.consumed_tokens
    tokens = "" if counted is None else f", {counted:,} trained tokens"
    last = ", the last" if stage.first_step else ""
    yield "consumed", f"{manifest.consumed_samples:,} samples{last} of {length:,}{tokens}"
    yield "layout", layout_text(manifest.engine, manifest.model, manifest.layout)
    ranks = manifest.layout.world
    yield "ranks", f"{ranks:,}"
    scale = "" if manifest.loss_scale is None else f", loss scale {manifest.loss_scale}"
    yield "precision", f"{training['precision']}; weights and moments in fp32{scale}"
    parameters = sum(prod(one.shape) for one in held)
    frozen = sum(prod(one.shape) for one in held if not one.trained)
    nbytes = byte_size((parameters - frozen) * _STATE_BYTES + frozen * _WEIGHT_BYTES)
    detail = f"{len(held):,}, {human(parameters)} parameters, {nbytes} with both moments"
    yield "tensors", detail + (f"; {human(frozen)} are frozen and have none" if frozen else "")
    yield "files", f"{len(manifest.files):,}, {byte_size(manifest.nbytes)}"
    yield "W&B run", manifest.wandb_id or "none"
    yield "versions", ", ".join(map(" ".join, manifest.packages.items()))


TENSORS = Table[Held](
    {
        "tensor": lambda held: held.name,
        "shape": lambda held: str(list(held.shape)),
        "pieces": lambda held: f"{held.pieces:,}",
    }
)
