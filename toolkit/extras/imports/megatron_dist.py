"""Megatron-LM's checkpoints in megatron-core's format `torch_dist`.

Its tensors do not depend on the layout that saved them, and the families' maps name the Hugging
Face tensors that each one consists of. The distributed optimizer stores its states under the
names of the weights (`fully_reshardable`), as the other optimizers do, or as its flat buffers
(`dp_reshardable`, see `megatron_buffers.py`).
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from toolkit.errors import CheckpointError
from toolkit.extras.convert.checkpoint_keys import TensorLocation, found_place
from toolkit.extras.convert.source import TRACKER, iteration_folder, whole_blocks
from toolkit.extras.convert.torch_dist import COMMON_FILE, FORMAT_FILE, METADATA, Reader
from toolkit.extras.imports.base import (
    ForeignState,
    LazyShard,
    RecipeModel,
    group_settings,
    require_adamw,
)
from toolkit.extras.imports.megatron_buffers import Buffers
from toolkit.extras.imports.pickles import load_pickle
from toolkit.extras.imports.stored_objects import stored_object
from toolkit.models.families import FAMILIES, MegatronModel, mapped
from toolkit.models.families.base import Instance
from toolkit.optimizers.base import MOMENTS

COMMON_OBJECT = "common_state/shard_0_1"
MASTERS = ("param", "fp32_param")
"""Names of the fp32 weights among an optimizer's states; without them, the weights train."""
_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.(?:state\.(\w+?)\.(.+)|distributed\..*\.([^.]+))"
)
"""Keys of an optimizer's states: of a named weight, or of a flat buffer."""
_UNSTATED = "its schedule and precision are not compared with the recipe's"
_MODEL = "state its model in model.config"
CLASSES = (
    "megatron.core.enums.Fp8Recipe",
    "megatron.core.enums.Fp4Recipe",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "pathlib.PosixPath",
    "signal.Signals",
)
"""Plain classes among Megatron-LM's arguments."""


class MegatronDist:
    """See `ForeignCheckpoint`."""

    title = "Megatron-LM torch_dist"
    files = f"{TRACKER} above the iterations, or {METADATA} and {FORMAT_FILE}"

    def matches(self, folder: Path) -> bool:
        inside = all((folder / name).is_file() for name in (METADATA, FORMAT_FILE))
        return inside or (folder / TRACKER).is_file()

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:
        """The state, saved in any layout."""
        iteration = iteration_folder(folder)
        assert iteration is not None, "it matches"
        reader, megatron = Reader(iteration), _map(model)
        common = _common(iteration, reader)
        arguments = vars(common["args"]) if "args" in common else {}
        step = int(common["iteration"])
        require_same_tensors(reader, megatron, arguments)
        buffers = Buffers(reader, iteration, megatron)
        states = buffers if buffers.groups else States(reader, iteration, megatron)
        groups = _groups(common.get("optimizer", {}))
        require_adamw(groups, ())
        if arguments.get("optimizer", "adam") != "adam":
            raise CheckpointError(f"its optimizer is {arguments['optimizer']}, not Adam")
        return ForeignState(
            step,
            _updates(common, groups, step),
            [*states.shards()],
            consumed_samples=arguments.get("consumed_train_samples"),
            settings=_settings(arguments, groups),
            notes=(_UNSTATED,),
        )


MEGATRON = MegatronDist()


def _common(folder: Path, reader: Reader) -> Mapping[str, Any]:
    """The state that all ranks share: a file, or an object among the data since 0.19."""
    if (folder / COMMON_FILE).exists():
        return cast(Mapping[str, Any], load_pickle(folder, COMMON_FILE, CLASSES))
    (common,) = stored_object(reader, COMMON_OBJECT, CLASSES)
    return cast(Mapping[str, Any], common)


def _map(model: RecipeModel) -> MegatronModel:
    config = model.config.to_dict()
    if config.get("model_type") not in FAMILIES:
        raise CheckpointError(
            f"model.config.model_type: {config.get('model_type')!r} has no map from Megatron's "
            f"tensors; known are {', '.join(sorted(FAMILIES))}"
        )
    return mapped(config)


def _groups(optimizer: Mapping[Any, Any]) -> list[Mapping[str, Any]]:
    """Parameter groups of all optimizers of a chain; flat buffers keep theirs elsewhere."""
    parts = [one for key, one in optimizer.items() if isinstance(key, int)] or [optimizer]
    inner = [part.get("optimizer", part) for part in parts]
    return [group for one in inner for group in one.get("param_groups", ())]


def _updates(common: Mapping[str, Any], groups: list[Mapping[str, Any]], step: int) -> int:
    """Updates that AdamW has made; the number of steps where none is stored."""
    optimizer = common.get("optimizer", {})
    state = optimizer.get("optimizer", optimizer).get("state", {})
    stated = {int(group["step"]) for group in groups if "step" in group}
    if "common_step" in state:
        stated.add(int(state["common_step"]))
    if len(stated) > 1:
        raise CheckpointError(f"its parameters were updated {sorted(stated)} times")
    return stated.pop() if stated else step


def _settings(
    arguments: Mapping[str, Any], groups: list[Mapping[str, Any]]
) -> dict[str, object]:
    """What the run was configured with, by the recipe's keys."""
    names = {
        "global_batch_size": "training.global_batch_size",
        "seq_length": "training.sequence_length",
        "clip_grad": "optimizer.clip_grad_norm",
        "lr": "optimizer.learning_rate",
    }
    found = {ours: arguments[name] for name, ours in names.items() if name in arguments}
    return group_settings(groups) | found


class States:
    """The weights and moments of a checkpoint as Megatron tensors, each one whole."""

    def __init__(self, reader: Reader, folder: Path, model: MegatronModel) -> None:
        self.reader, self.folder, self.model = reader, folder, model

    def shards(self) -> Iterator[LazyShard]:
        """Every tensor of the model. Raises CheckpointError for states of another shape, and
        for those that are stored in no form that is known."""
        for instance in self.model.instances(buffers=True):
            place = found_place(self.model, instance, self.reader.tensors)
            assert place is not None, "require_same_tensors has found it"
            keys = self._keys(place.key)
            weight = self.reader.tensors[place.key]
            for key in keys.values():
                if self.reader.tensors[key].size != weight.size:
                    raise CheckpointError(
                        f"{self.folder}: {key} has another shape than {place.key}"
                    )
            trains = len(keys) > 1
            if trains and self.reader.tensors[keys["weight"]].dtype != torch.float32:
                raise CheckpointError(
                    f"{self.folder} has no fp32 weights of {place.key}, only {weight.dtype}",
                    fix="continue a checkpoint of an optimizer that keeps fp32 weights",
                )
            reads = {one: partial(self._read, instance, place, keys[one]) for one in keys}
            yield LazyShard(whole_blocks(instance), reads)

    def _keys(self, weight: str) -> dict[str, str]:
        """Where the states of a weight are stored, by quantity."""
        found = {"weight": weight}
        chain = ["", *(f"chained_{number}." for number in range(8))]
        for prefix in (f"{one}optimizer.state." for one in chain):
            names = {m: f"{prefix}{m}.{weight}" for m in MOMENTS}
            if all(name in self.reader.tensors for name in names.values()):
                found |= names
                for master in (f"{prefix}{one}.{weight}" for one in MASTERS):
                    if master in self.reader.tensors:
                        found["weight"] = master
        return found

    def _read(self, instance: Instance, place: TensorLocation, key: str) -> Tensor:
        """A whole Megatron tensor without padding, flattened."""
        tensor = instance.tensor
        columns = () if tensor.columns is None else (tensor.columns,)
        offset = (*place.index, *(0,) * (1 + len(columns)))
        size = (*(1,) * len(place.index), tensor.rows, *columns)
        return self.reader.read(key, offset, size)


def require_same_tensors(
    reader: Reader, model: MegatronModel, arguments: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless the checkpoint has the tensors of the model, and no more."""
    names = set()
    for instance in model.instances(buffers=True):
        place = found_place(model, instance, reader.tensors)
        if place is None:
            raise CheckpointError(f"{reader.folder} has no {instance.tensor.name}", fix=_MODEL)
        names.add(place.key)
        _require_shape(reader, instance, place, arguments)
    for key in reader.tensors:
        state = _STATE.fullmatch(key)
        name = state[2] if state else key
        if state and (state[1] or state[3]) not in (*MOMENTS, *MASTERS, "step"):
            raise CheckpointError(f"{reader.folder} has {key}, which AdamW does not keep")
        if name is not None and name not in names and "_extra_state" not in name:
            raise CheckpointError(
                f"{reader.folder} has {key}, the recipe's model does not", fix=_MODEL
            )


def _require_shape(
    reader: Reader, instance: Instance, place: TensorLocation, arguments: Mapping[str, Any]
) -> None:
    """The vocabulary may be padded, to a multiple that TP divides."""
    tensor, size = instance.tensor, reader.tensors[place.key].size
    columns = () if tensor.columns is None else (tensor.columns,)
    expected = (*place.sizes, tensor.rows, *columns)
    if tensor.padded and size[1:] == expected[1:]:
        # A rank's part is a rectangle of its own.
        ranks = size[0] // max(1, min(rows for rows, *_ in reader.stored_sizes(place.key)))
        multiple = arguments.get("make_vocab_size_divisible_by", 128) * ranks
        if 0 <= size[0] - expected[0] < multiple:
            return
    if size != expected:
        raise CheckpointError(
            f"{reader.folder}: {place.key} has the shape {size}, the recipe's model {expected}",
            fix=_MODEL,
        )
