"""Folders `checkpoint-N` of transformers' Trainer, with or without FSDP.

Under DeepSpeed a folder holds a checkpoint of DeepSpeed, which that format reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.shards import parameter_blocks
from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import (
    ForeignState,
    LazyShard,
    RecipeModel,
    group_notes,
    group_settings,
    require_adamw,
    whole_number,
)
from toolkit.extras.imports.dcp import StoredModel
from toolkit.extras.imports.pickles import load_pickle
from toolkit.models.frozen import is_frozen, matching
from toolkit.models.weights import SafetensorsWeights, checkpoint_names, is_correction_bias
from toolkit.optimizers.base import MOMENTS
from toolkit.system.untrusted import read_json, regular_inside

STATE, OPTIMIZER, SCHEDULER = "trainer_state.json", "optimizer.pt", "scheduler.pt"
SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
"""Folders of torch.distributed.checkpoint that Accelerate writes under FSDP."""


class Trainer:
    """See `ForeignCheckpoint`."""

    title = "transformers' Trainer"
    files = f"{STATE} with {OPTIMIZER}, or with {' and '.join(SHARDED)}"

    def matches(self, folder: Path) -> bool:
        return (folder / STATE).is_file()

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:
        """The state. Its schedule is a function of the step, which the recipe states."""
        saved = read_json(regular_inside(folder, STATE))
        step = whole_number(saved["global_step"], "global_step")
        settings: dict[str, object] = {}
        notes: list[str] = []
        if all((folder / name).is_dir() for name in SHARDED):
            sharded = StoredModel([folder / name for name in SHARDED], model)
            shards, updates = sharded.shards(), sharded.updates()
        else:
            optimizer = load_pickle(folder, OPTIMIZER)
            require_adamw(optimizer["param_groups"], optimizer["state"].values())
            updates = _updates(folder, optimizer)
            shards = [*_shards(folder, model, optimizer)]
            groups = optimizer["param_groups"]
            settings = group_settings(groups)
            names = _names(folder, model, groups)
            shapes = [[model.parameters[name] for name in one] for one in names]
            notes += group_notes(groups, shapes)
        scheduler = load_pickle(folder, SCHEDULER)
        if (position := whole_number(scheduler["last_epoch"], "last_epoch")) != step:
            notes.append(f"its schedule was at step {position}, the run continues at {step}")
        settings["optimizer.learning_rate"] = max(scheduler["base_lrs"])
        settings["training.steps"] = saved["max_steps"]
        return ForeignState(step, updates, shards, settings=settings, notes=tuple(notes))


TRAINER = Trainer()


def _updates(folder: Path, optimizer: Mapping[str, Any]) -> int:
    """Updates that the optimizer has made."""
    updates = {whole_number(state["step"], "step") for state in optimizer["state"].values()}
    if len(updates) != 1:
        raise CheckpointError(
            f"{folder / OPTIMIZER}: its parameters were updated {sorted(updates)} times"
        )
    return updates.pop()


def _shards(
    folder: Path, model: RecipeModel, optimizer: Mapping[str, Any]
) -> Iterator[LazyShard]:
    """Every parameter: its weight from the model's files, its moments from the optimizer's."""
    shapes = dict(model.parameters)
    prefix = next(iter(shapes)).partition(".")[0]
    for path in folder.glob("*.safetensors"):
        regular_inside(folder, path.name)
    weights = SafetensorsWeights(folder, shapes, prefix)
    moments = _moments(folder, model, optimizer)
    for name, shape in shapes.items():
        blocks = parameter_blocks(name, shape)
        reads: dict[str, Callable[[], Tensor]] = {
            "weight": partial(weights.read, name, 0, prod(shape))
        }
        for quantity, values in moments.get(name, {}).items():
            if tuple(values.shape) != shape:
                raise CheckpointError(
                    f"{folder / OPTIMIZER}: {quantity} of {name} has the shape "
                    f"{tuple(values.shape)}, the model needs {shape}"
                )
            reads[quantity] = values.contiguous
        yield LazyShard(blocks, reads)


def _moments(
    folder: Path, model: RecipeModel, optimizer: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Both moments of every parameter that trains, which the file has by its number."""
    groups, states = optimizer["param_groups"], optimizer["state"]
    found: dict[str, dict[str, Tensor]] = {}
    for group, names in zip(groups, _names(folder, model, groups), strict=True):
        for number, name in zip(group["params"], names, strict=True):
            state = states[number]
            found[name] = {one: state[one] for one in MOMENTS}
    return found


def _names(
    folder: Path, model: RecipeModel, groups: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """The parameters of each group, in the order in which the Trainer numbers them.

    It has two groups, each in the order of the model: first those with weight decay, then
    biases and norms.
    """
    frozen = matching(model.recipe.model.freeze, model.tensors)
    trained = {
        name: shape
        for name, shape in model.parameters.items()
        if not is_correction_bias(name)
        and not is_frozen(frozen, [piece.name for piece in checkpoint_names(name, shape)])
    }
    decayed = [name for name, shape in trained.items() if len(shape) > 1 and "bias" not in name]
    names = [decayed, [name for name in trained if name not in decayed]]
    if len(groups) == 1:
        names = [[*trained]]
    if all("param_names" in group for group in groups):  # an optimizer of named parameters
        names = [list(group["param_names"]) for group in groups]
    expected = [len(one) for one in names if one]
    found = [len(group["params"]) for group in groups if group["params"]]
    if found != expected or len(names) != len(groups):
        raise CheckpointError(
            f"{folder / OPTIMIZER} has groups of {found} parameters, the Trainer groups those "
            f"of the recipe's model into {expected}",
            fix="state its model in model.config and what it froze in model.freeze; groups of "
            "your own cannot be told apart",
        )
    return names
