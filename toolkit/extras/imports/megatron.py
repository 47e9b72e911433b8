"""A Hugging Face folder as a checkpoint of Megatron-LM (`torch_dist`), and weights from one.

Such a checkpoint is a folder of torch.distributed.checkpoint whose tensors are whole and named
as megatron-core names them, so that any TP, PP and EP load it. A family's map says of which
rows of Hugging Face tensors they consist. megatron-core itself is not needed.
"""

import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import PretrainedConfig

from toolkit.checkpoint.export import entries
from toolkit.errors import CheckpointError, DataError
from toolkit.extras.imports.torch_dist import FORMAT_FILE, METADATA, Reader
from toolkit.models import huggingface as hf
from toolkit.models.families import MegatronModel, mapped, megatron_model, unsupported
from toolkit.models.families.base import Instance
from toolkit.models.families.tensors import Block, blocks
from toolkit.models.new_folder import appearing, check_destination
from toolkit.models.pretrained import SafetensorsWeights
from toolkit.models.safetensors import write_model
from toolkit.models.weights import is_correction_bias
from toolkit.recipe.schema import ModelSection

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
TRACKER = "latest_checkpointed_iteration.txt"
TITLE = "Megatron-LM torch_dist"
FILES = f"{METADATA} and {FORMAT_FILE}, of one iteration"
RELEASE = "release"
"""Megatron-LM's name for weights without a training step."""
COMMON = {"checkpoint_version": 3.0, "iteration": 0}
"""3.0 is Megatron-LM's version with query, key and value in the order of our maps."""
FORMAT = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
"""The content of `FORMAT_FILE`. The common part is `common.pt`."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRAINING_STATE = re.compile(r"(chained_\d+\.)?optimizer\.|.*_extra_state")
"""Keys of tensors that are not weights. All others must belong to the model."""
_LARGEST_MULTIPLE = 128 * 64
"""Megatron-LM pads a vocabulary to at most this multiple: its default, times 64 tensor
ranks."""
_NORMS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
_NORMS_OF_LATENTS = {
    f"self_attention.{part}_layernorm.": f"self_attention.linear_{part}_up_proj.layer_norm_"
    for part in ("q", "kv")
}
_NORM_OF_MLP = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
"""Names of norms in checkpoints: those of Transformer Engine's layers, which hold the norm
inside the linear layer that follows it. Megatron-LM's other layers use them, too."""


class MegatronPlace(NamedTuple):
    """Where a checkpoint holds a tensor of a layer."""

    key: str
    numbers: tuple[int, ...]
    """Its layer and its expert, if `key` stacks those of all."""
    shape: tuple[int, ...]
    """Of all that `key` holds."""


def place_of(instance: Instance, model: MegatronModel, *, apart: bool) -> MegatronPlace:
    """The place of a tensor. `apart`: each layer has its own keys."""
    tensor, layer, expert = instance.tensor, instance.layer, instance.expert
    names = _NORMS_OF_LATENTS if model.transformer.get("multi_latent_attention") else _NORMS
    if layer not in model.moe_layers:
        names = names | _NORM_OF_MLP
    key = tensor.name
    for ours, theirs in names.items():
        key = key.replace(ours, theirs)
    shape = (tensor.rows,) if tensor.columns is None else (tensor.rows, tensor.columns)
    index: tuple[int, ...] = ()
    if expert is not None:
        key = key.replace(".local_experts.{expert}.", ".experts.")
        index, shape = (expert,), (model.transformer["num_moe_experts"], *shape)
    if layer is None or apart:
        return MegatronPlace(key.format(layer=layer), index, shape)
    stacked = (model.transformer["num_layers"], *shape)
    return MegatronPlace(key.replace(".{layer}.", "."), (layer, *index), stacked)


def matches(folder: Path) -> bool:
    """Whether the folder is one iteration of megatron-core's."""
    return all((folder / name).is_file() for name in (METADATA, FORMAT_FILE))


def _blocks(instance: Instance) -> list[Block]:
    return blocks(instance.tensor, 0, 1, layer=instance.layer, expert=instance.expert)


# --- reading ----------------------------------------------------------------------------


def read_megatron(folder: Path, config: PretrainedConfig, dst: Path) -> list[str]:
    """Write the weights of a checkpoint as the Hugging Face folder `dst`, in the dtype of the
    embedding; what is to be said about them. Raises CheckpointError or DataError."""
    if (reason := unsupported(config.to_dict())) is not None:
        raise CheckpointError(f"model.config: {reason}")
    nbytes = sum(file.stat().st_size for file in folder.glob("*.distcp"))
    check_destination(folder, dst, nbytes)
    reader, model = Reader(folder), mapped(config.to_dict())
    if EMBEDDING not in reader.tensors:
        raise CheckpointError(f"{folder} has no {EMBEDDING}: it holds no GPTModel")
    sizes = {key: tuple(entry.size) for key, entry in reader.tensors.items()}
    apart = any(".layers.0." in key for key in sizes)
    places = [(one, place_of(one, model, apart=apart)) for one in model.instances(buffers=True)]
    notes = [*_check_fit(folder, sizes, {place.key: place.shape for _, place in places})]
    dtype = reader.tensors[EMBEDDING].properties.dtype
    dtype = dtype if dtype in DTYPES else torch.float32
    weights = MegatronWeights(reader, places, hf.checkpoint_shapes(config))
    with appearing(dst) as hidden:
        hf.save_companions(config, dtype, hidden)
        write_model(hidden, entries(weights, dtype, config))
    return notes


class MegatronWeights:
    """The tensors of a checkpoint as those of a Hugging Face folder, read when asked for."""

    def __init__(
        self,
        reader: Reader,
        places: Iterable[tuple[Instance, MegatronPlace]],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._read = lru_cache(maxsize=4)(reader.read)  # one has rows of several tensors
        self._shapes = shapes
        self._parts = defaultdict[str, list[tuple[MegatronPlace, int, Block]]](list)
        """Of each tensor, its rectangles: in which tensor they are, from which row on."""
        for instance, place in places:
            row = 0
            for block in _blocks(instance):
                self._parts[block.tensor].append((place, row, block))
                row += len(block.row_numbers)

    def in_pieces(self, quantity: str, name: str) -> Iterator[Tensor]:
        """See `SavedState.in_pieces`. In one piece."""
        assert quantity == "weight"
        parts = [
            (self._read(place.key, place.numbers)[row : row + len(block.row_numbers)], block)
            for place, row, block in self._parts[name]
        ]
        whole = torch.empty(self._shapes[name], dtype=parts[0][0].dtype)
        for values, block in parts:
            stored = block.stored
            rectangle = whole[slice(*stored.rows, stored.steps[0])]
            if stored.columns is not None:
                rectangle = rectangle[:, slice(*stored.columns, stored.steps[1])]
            rectangle.copy_(values.T if block.transposed else values)
        yield whole


def _check_fit(
    folder: Path, sizes: Mapping[str, Sequence[int]], needed: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    """Return notes on what is left out. Raises CheckpointError for keys that only one side has,
    and for other shapes, but for rows that pad a vocabulary."""
    keys = {key for key in sizes if not _TRAINING_STATE.match(key)}
    for key in sorted(keys ^ needed.keys()):
        where = "it has" if key in sizes else "it has no"
        raise CheckpointError(
            f"{folder}: {where} {key}, unlike the model", fix="state its model in model.config"
        )
    for key, shape in needed.items():
        more = sizes[key][0] - shape[0] if key in (EMBEDDING, HEAD) else 0
        if not 0 <= more < _LARGEST_MULTIPLE or [*sizes[key]] != [shape[0] + more, *shape[1:]]:
            raise CheckpointError(
                f"{folder}: {key} has the shape {[*sizes[key]]}, the model's is {[*shape]}",
                fix="state its model in model.config",
            )
        if more:
            yield f"{more} rows of padding in {key} are left out"


# --- writing ----------------------------------------------------------------------------


def write_megatron(source: Path, dst: Path) -> None:
    """Write the model of a Hugging Face folder into the new folder `dst`.

    Raises PlanError for a model that megatron-core does not compute identically, DataError for
    weights that do not fit its config, CheckpointError where writing fails.
    """
    section = ModelSection(hub=str(source), init="pretrained")
    config = hf.build_config(section)
    model, weights = megatron_model(config.to_dict()), hf.weight_source(section, config, 0)
    assert isinstance(weights, SafetensorsWeights), "no rows are added"
    dtypes = {
        weights.stored.part(name).get_dtype() for name in weights.files
        if not is_correction_bias(name) and name not in weights.buffers
    }  # fmt: skip
    if len(dtypes) > 1:
        raise DataError(
            f"{source}: its tensors are of {', '.join(sorted(dtypes))}; a Megatron checkpoint "
            "has one type",
            fix="save the model in one dtype first",
        )
    nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    check_destination(source, dst, nbytes)
    state = _stacked(model, weights)
    with appearing(dst) as hidden:
        folder = hidden / RELEASE
        folder.mkdir()
        try:
            with warnings.catch_warnings(action="ignore"):  # that no other rank takes part
                save(state, checkpoint_id=folder, no_dist=True)
        except CheckpointException as error:
            (reason, _), *_ = error.failures.values()
            raise CheckpointError(f"{dst} cannot be written: {reason}") from error
        torch.save(COMMON, folder / "common.pt")
        (folder / FORMAT_FILE).write_text(json.dumps(FORMAT))
        (hidden / TRACKER).write_text(RELEASE)


def _stacked(model: MegatronModel, weights: SafetensorsWeights) -> dict[str, Any]:
    """The content of a checkpoint. As megatron-core does, tensors of equal layers are
    stacked."""
    apart = "moe_layer_freq" in model.transformer
    state: dict[str, Any] = {}
    for instance in model.instances(buffers=True):
        key, index, shape = place_of(instance, model, apart=apart)
        values = torch.cat([weights.read_block(block) for block in _blocks(instance)])
        if key not in state:
            state[key] = values.new_empty(shape)
        state[key][index] = values
        if re.search(r"\.linear_\w+\.weight$", key) and instance.tensor.split != "none":
            # megatron-core wants a state of Transformer Engine's for each linear layer.
            place, sizes = index or (0,), shape[: len(index)] or (1,)
            shard = "_".join(".".join(map(str, numbers)) for numbers in (place, sizes))
            state[f"{key.removesuffix('weight')}_extra_state/shard_{shard}"] = [None]
    return state
