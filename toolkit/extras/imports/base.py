"""Checkpoints of other tools: what one yields, and which tools are known.

A format reads its files without running code from them (`pickles.py`) and yields the state as
`StateShard`s: elements under the names of the Hugging Face checkpoint, from whichever files
hold them. `run.py` makes a checkpoint of a run from any format's state.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PretrainedConfig

from toolkit.checkpoint.shards import (
    StateShard,
    block_numel,
    cut,
    dtype_of,
    parameter_blocks,
)
from toolkit.errors import CheckpointError
from toolkit.models.families.tensors import Block
from toolkit.optimizers.base import MOMENTS
from toolkit.recipe.schema import Recipe
from toolkit.registry import Registry

Shapes = Mapping[str, tuple[int, ...]]
_STEPS = 10**8
"""Folders of checkpoints have names with eight digits."""
SAMPLES = 10**15
"""More than any run can have consumed."""
_STATES = {*MOMENTS, "step", "master_param"}
"""What AdamW keeps of a parameter, in torch, DeepSpeed and Transformer Engine."""


@dataclass(frozen=True)
class RecipeModel:
    """The model that the recipe trains, whose tensors an import must fill."""

    recipe: Recipe
    config: PretrainedConfig
    parameters: Shapes
    """transformers' parameters and correction biases: `model.state_dict()` without tied ones.
    `shards.parameter_blocks(name, shape)` are the checkpoint tensors that one consists of."""
    tensors: Shapes
    """Tensors of its Hugging Face checkpoint, which differ where experts are stacked."""


@dataclass(frozen=True)
class ForeignState:
    """The training state in a checkpoint of another tool."""

    step: int
    """Steps done, skipped ones included."""
    optimizer_steps: int
    """Updates that AdamW has made, which its bias correction counts."""
    shards: Sequence[StateShard]
    """Every element of each tensor once: weight, and moments unless it is frozen. Values are
    mapped (`StateShard`) or read when they are written (`LazyShard`)."""
    consumed_samples: int | None = None
    """Sequences consumed; None where the checkpoint does not state them."""
    loss_scale: dict[str, Any] | None = None
    """`{"scale": float, "detail": {…}}`, as `Manifest.loss_scale`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the run that saved it, by the recipe's key; differences are reported."""
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


class ForeignCheckpoint(Protocol):
    """A format. Its module imports nothing of the tool, which need not be installed."""

    title: str
    """E.g. `DeepSpeed ZeRO`."""
    files: str
    """By which files it is recognised, for the error where no format is."""

    def matches(self, folder: Path) -> bool:
        """Whether the folder that the user named is one; looks at names only."""

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:
        """Raises CheckpointError for what is damaged, malicious or not supported."""


class LazyShard(StateShard):
    """Elements that are read each time they are asked for, of any dtype and shape."""

    in_memory = False

    def __init__(
        self, blocks: Sequence[Block], reads: Mapping[str, Callable[[], Tensor]]
    ) -> None:
        super().__init__(blocks, {}, saved_here=True)
        self._reads = reads

    @property
    def quantities(self) -> tuple[str, ...]:
        return tuple(self._reads)

    def get(self, quantity: str) -> Tensor:
        return self._reads[quantity]().detach().reshape(-1).to(dtype_of(quantity))


def whole_number(value: Any, name: str) -> int:
    """A whole number of a file, which may be a tensor. Raises CheckpointError."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, bool | str) or number != int(number):
        raise CheckpointError(f"its {name} is {number!r:.40}, not a whole number")
    return int(number)


def group_settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """What the optimizer was configured with, by the recipe's keys, as far as its groups say.

    A schedule changes `lr`, so that it is no setting; `initial_lr` is the highest rate.
    """
    found: dict[str, object] = {}
    if decays := [group["weight_decay"] for group in groups if "weight_decay" in group]:
        found["optimizer.weight_decay"] = max(decays)
    if betas := [list(group["betas"]) for group in groups if "betas" in group]:
        found["optimizer.betas"] = betas[0]
    if eps := [group["eps"] for group in groups if "eps" in group]:
        found["optimizer.eps"] = eps[0]
    if rates := {group["initial_lr"] for group in groups if "initial_lr" in group}:
        found["optimizer.learning_rate"] = max(rates)
    return found


def group_notes(
    groups: Sequence[Mapping[str, Any]], shapes: Sequence[Iterable[Sequence[int]]]
) -> Iterator[str]:
    """Differences between groups that a recipe has not; `shapes` are of their parameters."""
    decays: dict[bool, set[float]] = {True: set(), False: set()}
    for group, of_group in zip(groups, shapes, strict=True):
        for shape in of_group:
            decays[len(shape) > 1].add(group["weight_decay"])
    if others := sorted(decays[False] - {0.0}):
        yield (
            f"norms and biases had a weight decay of {', '.join(map(str, others))}, in a run "
            "of the recipe they have none"
        )
    if len(decays[True]) > 1:
        yield (
            f"matrices had weight decays of {', '.join(map(str, sorted(decays[True])))}, in a "
            "run of the recipe all have optimizer.weight_decay"
        )
    if len(rates := {group.get("initial_lr", group["lr"]) for group in groups}) > 1:
        yield (
            f"groups had learning rates of {', '.join(map(str, sorted(rates)))}, in a run of "
            "the recipe all have one"
        )


def require_adamw(
    groups: Iterable[Mapping[str, Any]], states: Iterable[Mapping[str, Any]]
) -> None:
    """Raise CheckpointError unless torch's groups and states are those of plain AdamW."""
    for state in states:
        if not {*MOMENTS} <= state.keys() <= _STATES:
            raise _other_optimizer(f"keeps {', '.join(sorted(map(str, state)))}")
    for group in groups:
        # RAdam keeps the same states and has all flags of AdamW but this one.
        if "decoupled_weight_decay" in group and "amsgrad" not in group:
            raise _other_optimizer("has the settings of RAdam")
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise _other_optimizer(f"is used with {flag}")
        if not group.get("bias_correction", True):
            raise _other_optimizer("is used without bias correction")
        if not group.get("decoupled_weight_decay", True) and group.get("weight_decay"):
            raise _other_optimizer("is Adam, whose weight decay is an L2 term of the gradient")


def _other_optimizer(what: str) -> CheckpointError:
    return CheckpointError(
        f"its optimizer {what}: only plain AdamW's states are read",
        fix="another optimizer's weights are a start, with model.init: pretrained",
    )


def fragment(
    parameter: str, shape: Sequence[int], start: int, values: Mapping[str, Tensor]
) -> StateShard:
    """The shard of elements from `start` on of a flattened transformers parameter.

    `values` are contiguous, in memory or mapped. Raises CheckpointError unless all quantities
    have the same number of elements, inside the parameter.
    """
    numel = values["weight"].numel()
    blocks = cut(parameter_blocks(parameter, shape), start, start + numel)
    fits = sum(map(block_numel, blocks)) == numel
    if not fits or any(one.numel() != numel for one in values.values()):
        raise CheckpointError(
            f"{parameter}: a part of it has {numel:,} elements from {start:,} on, of a tensor "
            f"{list(shape)}"
        )
    if not all(one.is_contiguous() for one in values.values()):
        raise CheckpointError(f"{parameter}: its elements do not follow one another")
    return StateShard(blocks, values, saved_here=True)


FOREIGN: Registry[ForeignCheckpoint] = Registry(
    "dmt.checkpoints",
    {
        "deepspeed": "toolkit.extras.imports.deepspeed:DEEPSPEED",
        "megatron": "toolkit.extras.imports.megatron:MEGATRON",
        "torch-dcp": "toolkit.extras.imports.dcp:DCP",
    },
)
"""Every format by name; the first that matches reads."""
