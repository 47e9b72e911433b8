"""The training state in a checkpoint of another tool, and how it fits a recipe.

A format reads its files without running code from them (`pickles.py`) and yields whole
parameters under transformers' names. `command.py` makes a checkpoint of a run from them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PretrainedConfig

from toolkit.checkpoint.shards import StateShard, dtype_of, parameter_blocks, state_quantities
from toolkit.errors import CheckpointError
from toolkit.models import huggingface as hf
from toolkit.models.frozen import matching
from toolkit.models.weights import is_correction_bias
from toolkit.recipe.schema import Recipe
from toolkit.run.changes import shown

Shapes = Mapping[str, tuple[int, ...]]
FLAGS = ("amsgrad", "maximize", "decoupled_weight_decay", "bias_correction")
"""Settings of a group by which other optimizers differ from AdamW."""
_COMPARED = ("betas", "eps", "weight_decay")


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
    """Read the tensor, of any dtype. Its elements are in the order of `shape`, but its own
    shape may differ."""


@dataclass(frozen=True)
class ForeignState:
    """The training state in a checkpoint of another tool."""

    step: int
    """Steps done, skipped ones included."""
    optimizer_steps: int
    """Updates that AdamW has made, which its bias correction counts."""
    parameters: Mapping[str, Mapping[str, StoredTensor]]
    """By name and quantity: the weight, and the moments of a parameter that trains."""
    groups: Sequence[Mapping[str, Any]]
    """The groups of its optimizer, with their settings under torch's names."""
    consumed_samples: int | None = None
    """Sequences consumed. None where the checkpoint does not state them."""
    notes: tuple[str, ...] = ()
    """What could not be carried over, a sentence each."""


class ParameterShard(StateShard):
    """A whole parameter, which is read each time a quantity is asked for."""

    in_memory = False

    def __init__(
        self, name: str, shape: Sequence[int], stored: Mapping[str, StoredTensor]
    ) -> None:
        super().__init__(parameter_blocks(name, shape), {}, saved_here=True)
        self._stored = stored

    @property
    def quantities(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def get(self, quantity: str) -> Tensor:
        return self._stored[quantity].read().detach().reshape(-1).to(dtype_of(quantity))


def recipe_model(recipe: Recipe) -> RecipeModel:
    """The model that an import must fill. Raises CheckpointError where a run of the recipe
    keeps something else than a whole model."""
    if recipe.adapter is not None:
        raise CheckpointError(
            "a run with adapters keeps only the adapters, which no other tool saves alike",
            fix="import into a recipe without `adapter`",
        )
    config = hf.build_config(recipe.model)
    return RecipeModel(
        recipe, config, hf.parameter_shapes(config), hf.checkpoint_shapes(config)
    )


def shards_of(state: ForeignState, model: RecipeModel) -> list[ParameterShard]:
    """The shards to write. Raises CheckpointError unless the state has every parameter of the
    recipe's model. Trained parameters also need AdamW's states."""
    check_adamw(state.groups)
    if problems := list(_problems(state, model)):
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(
            f"the checkpoint does not fit the recipe: {problems[0]}{more}",
            fix="state its model in model.config, what it froze in model.freeze, and its "
            "optimizer in optimizer.name",
        )
    return [
        ParameterShard(name, shape, state.parameters[name])
        for name, shape in model.parameters.items()
    ]


def _problems(state: ForeignState, model: RecipeModel) -> Iterator[str]:
    frozen = matching(model.recipe.model.freeze, model.tensors)
    optimizer = model.recipe.optimizer.name
    for name, shape in model.parameters.items():
        stored, expected = state.parameters.get(name, {}), {"weight"}
        for tensor in (block.tensor for block in parameter_blocks(name, shape)):
            if tensor not in frozen and not is_correction_bias(tensor):
                expected |= {*state_quantities(optimizer, tensor, model.tensors[tensor])}
        if missing := sorted(expected - stored.keys()):
            yield f"it has no {', '.join(missing)} of {name}"
        elif more := sorted(stored.keys() - expected):
            why = f"{optimizer} does not keep" if len(expected) > 1 else "does not train"
            yield f"it has {', '.join(more)} of {name}, which {why}"
        for quantity, one in stored.items():
            if one.shape not in (shape, (prod(shape),)):
                found, needed = list(one.shape), list(shape)
                yield f"its {quantity} of {name} has the shape {found}, the model's is {needed}"
    for name in state.parameters.keys() - model.parameters.keys():
        yield f"it has {name}, which the recipe's model has not"


def count(value: Any, name: str) -> int:
    """Read a count, which may be a tensor. Raises CheckpointError for anything else."""
    number = value.item() if isinstance(value, Tensor) else value
    if not isinstance(number, int | float) or number < 0 or number % 1:
        raise CheckpointError(f"its {name} is {number!r:.40}, which is no count")
    return int(number)


def updates(counts: set[int]) -> int:
    """How often all parameters were updated. Raises CheckpointError for different numbers."""
    if len(counts) != 1:
        found = ", ".join(map(str, sorted(counts))) or "not stated"
        raise CheckpointError(f"the number of updates of its parameters is {found}")
    return counts.pop()


def check_adamw(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise CheckpointError for groups of another optimizer than AdamW."""
    for group in groups:
        # RAdam keeps the same states and has all flags of AdamW but this one.
        if "decoupled_weight_decay" in group and "amsgrad" not in group:
            raise other_optimizer("has the settings of RAdam")
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise other_optimizer(f"is used with {flag}")
        if not group.get("bias_correction", True):
            raise other_optimizer("is used without bias correction")
        if not group.get("decoupled_weight_decay", True) and group.get("weight_decay"):
            raise other_optimizer("is Adam, whose weight decay is an L2 term of the gradient")


def other_optimizer(what: str) -> CheckpointError:
    """The error for a checkpoint of another optimizer. `what` is the evidence for it."""
    return CheckpointError(
        f"its optimizer {what}: only plain AdamW's states are read",
        fix="another optimizer's weights are a start, with model.init: pretrained",
    )


def differences(groups: Sequence[Mapping[str, Any]], recipe: Recipe) -> Iterator[str]:
    """The optimizer's settings that differ from the recipe's."""
    ours = recipe.optimizer.model_dump(mode="json")
    for key in _COMPARED:
        theirs = {shown(_plain(group[key])) for group in groups if key in group}
        mine, decays = shown(ours[key]), key == "weight_decay"
        if theirs and theirs != {mine, *([shown(0.0)] if decays else [])}:
            norms = ", and norms and biases have none" if decays else ""
            was = ", ".join(sorted(theirs))
            yield f"optimizer.{key} was {was}, the recipe's {mine} applies{norms}"
    if not groups:
        yield "the checkpoint does not state the settings of its optimizer"


def _plain(value: Any) -> object:
    return [*value] if isinstance(value, tuple | list) else float(value)
