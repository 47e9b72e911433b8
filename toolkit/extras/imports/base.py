"""Checkpoints of other tools: what one yields, and which tools are known.

A format reads its files without running code from them (`pickles.py`) and yields whole
parameters under transformers' names. `run.py` makes a checkpoint of a run from any of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PretrainedConfig

from toolkit.errors import CheckpointError
from toolkit.recipe.schema import Recipe
from toolkit.registry import Registry

Shapes = Mapping[str, tuple[int, ...]]
_STEPS = 10**8
"""Folders of checkpoints have names with eight digits."""
SAMPLES = 10**15
"""More than any run can have consumed."""


@dataclass(frozen=True)
class RecipeModel:
    """The model that the recipe trains, whose tensors an import must fill."""

    recipe: Recipe
    config: PretrainedConfig
    parameters: Shapes
    """transformers' parameters and correction biases, without tied ones."""
    tensors: Shapes
    """Tensors of its Hugging Face checkpoint, which differ where experts are stacked."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, which is read each time it is asked for."""

    shape: tuple[int, ...]
    """The parameter's, or flat."""
    read: Callable[[], Tensor]
    """Of any dtype; in the order of `shape`, whatever its own shape."""


@dataclass(frozen=True)
class ForeignState:
    """The training state in a checkpoint of another tool."""

    step: int
    """Steps done, skipped ones included."""
    optimizer_steps: int
    """Updates that AdamW has made, which its bias correction counts."""
    parameters: Mapping[str, Mapping[str, StoredTensor]]
    """By name and quantity: the weight, and the moments unless it is frozen."""
    consumed_samples: int | None = None
    """Sequences consumed; None where the checkpoint does not state them."""
    loss_scale: dict[str, Any] | None = None
    """`{"scale": float, "detail": {…}}`, as `Manifest.loss_scale`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the run that saved it, by keys of `COMPARED`."""
    notes: tuple[str, ...] = ()
    """What the user should know, e.g. what is not carried over."""

    def __post_init__(self) -> None:
        """Raise CheckpointError for numbers that no run can have counted."""
        limits = {"step": _STEPS, "optimizer_steps": _STEPS, "consumed_samples": SAMPLES}
        for name, limit in limits.items():
            number: Any = getattr(self, name)
            if number is None and name == "consumed_samples":
                continue
            if type(number) is not int or not 0 <= number < limit:
                raise CheckpointError(
                    f"its {name} is {number!r:.40}, not a number from 0 to {limit - 1:,}",
                    fix="it is damaged, or of a version that is not supported",
                )


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A format. Its module imports nothing of the tool, which need not be installed."""

    title: str
    """E.g. `DeepSpeed universal`."""
    files: str
    """By which files it is recognised, for the error where no format is."""
    matches: Callable[[Path], bool]
    """Whether the folder that the user named is one; looks at names only."""
    read: Callable[[Path, RecipeModel], ForeignState]
    """Raises CheckpointError for what is damaged, malicious or not supported."""


def whole_number(value: Any, name: str) -> int:
    """A whole number of a file, which may be a tensor. Raises CheckpointError."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool | str) or number != int(number):
        raise CheckpointError(f"its {name} is {number!r:.40}, not a whole number")
    return int(number)


def updates_of(counts: set[int], otherwise: int | None = None) -> int:
    """How often the parameters were updated, of their `counts`; `otherwise` where there are
    none. Raises CheckpointError where they differ, or none is stated at all."""
    if len(counts) > 1:
        raise CheckpointError(f"its parameters were updated {sorted(counts)} times")
    updates = next(iter(counts), otherwise)
    if updates is None:
        raise CheckpointError("it does not state how often its parameters were updated")
    return updates


FOREIGN: Registry[ForeignCheckpoint] = Registry(
    "dmt.checkpoints",
    {
        "deepspeed": "toolkit.extras.imports.deepspeed:DEEPSPEED",
        "megatron": "toolkit.extras.imports.megatron:MEGATRON",
        "torch-dcp": "toolkit.extras.imports.dcp:DCP",
    },
)
"""Every format by name; the first that matches reads."""
