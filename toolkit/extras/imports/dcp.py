"""torch.distributed.checkpoint folders of a transformers model, e.g. of FSDP2 or Accelerate.

Tensors of a state dict are stored under the names of its nested keys, joined by dots. What
`get_state_dict` returns has a parameter's moments at `state.NAME.exp_avg`; what precedes these
names is up to the program that saved. torchtitan has names of its own for llama, whose rotary
positions turn neighbouring rows of a head where transformers turns its halves.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from toolkit.checkpoint.shards import parameter_blocks
from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import (
    ForeignState,
    LazyShard,
    RecipeModel,
    group_settings,
    require_adamw,
    whole_number,
)
from toolkit.extras.imports.pickles import load_pickle
from toolkit.extras.imports.torch_dist import FORMAT_FILE, METADATA, Reader
from toolkit.optimizers.base import MOMENTS

STEP = "step"
ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""The folders of a model and its optimizer under FSDP, also those of transformers' Trainer."""
Groups = Mapping[str, Mapping[str, Any]]
"""Options of an optimizer's parameter groups; a group may be one parameter, by its name."""
_OPTIONS = {
    "params", "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize",
    "decoupled_weight_decay", "bias_correction",
}  # fmt: skip
_TORCHTITAN = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.norm.": "norm.",
    "lm_head.": "output.",
    "model.layers.": "layers.",
    "self_attn.q_proj.": "attention.wq.",
    "self_attn.k_proj.": "attention.wk.",
    "self_attn.v_proj.": "attention.wv.",
    "self_attn.o_proj.": "attention.wo.",
    "mlp.gate_proj.": "feed_forward.w1.",
    "mlp.up_proj.": "feed_forward.w3.",
    "mlp.down_proj.": "feed_forward.w2.",
    "input_layernorm.": "attention_norm.",
    "post_attention_layernorm.": "ffn_norm.",
}
"""Parts of transformers' names of llama, and torchtitan's."""
_TURNED = {
    "self_attn.q_proj.": "num_attention_heads",
    "self_attn.k_proj.": "num_key_value_heads",
}
"""Weights whose rows it orders differently, and the key of the number of their heads."""
Stored = Mapping[str, Reader]
"""Every stored tensor's reader, by its key."""


class DistributedCheckpoint:
    """See `ForeignCheckpoint`."""

    title = "torch.distributed.checkpoint"
    files = f".metadata and *.distcp, or the folders {' and '.join(ACCELERATE)}"

    def matches(self, folder: Path) -> bool:
        """Also megatron-core writes these files, and one about the format in addition."""
        whole = (folder / METADATA).is_file() and not (folder / FORMAT_FILE).exists()
        return whole or all((folder / name / METADATA).is_file() for name in ACCELERATE)

    def read(self, folder: Path, model: RecipeModel) -> ForeignState:
        """The state, whose step is the number of the optimizer's updates."""
        whole = (folder / METADATA).is_file()
        saved = StoredModel([folder] if whole else [folder / n for n in ACCELERATE], model)
        updates = saved.updates()
        notes = [
            "its step is the number of its optimizer's updates: skipped steps are not stored",
            "not stated by this format: "
            f"{'' if saved.groups else 'optimizer settings, '}schedule, clipping, batch size, "
            "sequence length and precision",
            *saved.notes(),
        ]
        groups = [*saved.groups.values()]
        settings = group_settings(groups)
        if rates := [group["lr"] for group in groups if isinstance(group.get("lr"), float)]:
            settings.setdefault("optimizer.learning_rate", rates[-1])
        return ForeignState(
            updates, updates, saved.shards(), settings=settings, notes=tuple(notes)
        )


DCP = DistributedCheckpoint()


class StoredModel:
    """A model and its AdamW, whose parts may be in several folders.

    Raises CheckpointError for another model or optimizer, or without the states of one.
    """

    def __init__(self, folders: Sequence[Path], model: RecipeModel) -> None:
        readers = [Reader(folder) for folder in folders]
        self.model, self.where = model, folders[0]
        self.stored = {key: reader for reader in readers for key in reader.tensors}
        self.names = _names(self.where, self.stored, model)
        names = self.names.values()
        self.prefix = _prefix_of_weights(self.where, self.stored, next(iter(names)))
        self.states = _prefix_of_states(self.where, self.stored, names)
        _check_rest(self.where, self.stored, self.prefix, self.states, names)
        self.groups: Groups = {}
        if self.states.endswith("state."):
            beside = f"{self.states.removesuffix('state.')}param_groups."
            self.groups = _parameter_groups(readers, beside)
        require_adamw(self.groups.values(), ())

    def updates(self) -> int:
        """How often every parameter was updated."""
        updates = {
            whole_number(self.stored[key].read(key), key)
            for name in self.names.values()
            if (key := f"{self.states}{name}.{STEP}") in self.stored
        }
        if not updates:
            raise CheckpointError(
                f"{self.where} does not state how often its parameters were updated"
            )
        if len(updates) > 1:
            raise CheckpointError(
                f"{self.where}: its parameters were updated {sorted(updates)} times"
            )
        return updates.pop()

    def shards(self) -> list[LazyShard]:
        """Every parameter."""
        shards = []
        for name, shape in self.model.parameters.items():
            reads = _reads(self.stored, self.names[name], shape, self.prefix, self.states)
            heads = next((key for part, key in _TURNED.items() if part in name), None)
            if self.names[name] != name and heads is not None:
                number = getattr(self.model.config, heads)
                reads = {one: partial(_halves, read, number) for one, read in reads.items()}
            shards.append(LazyShard(parameter_blocks(name, shape), reads))
        return shards

    def notes(self) -> Iterator[str]:
        """What differs from a run of the recipe."""
        for name, shape in self.model.parameters.items():
            mine = (
                group.get("weight_decay")
                for number, group in self.groups.items()
                if self.names[name] in (number, *group.get("params", ()))
            )
            if len(shape) == 1 and any(mine):
                yield f"weight decay was applied to {name}, too; the recipe's is not"
                break
        weights = (f"{self.prefix}{name}" for name in self.names.values())
        dtypes = {self.stored[weight].tensors[weight].dtype for weight in weights}
        if rounded := dtypes - {torch.float32}:
            kinds = ", ".join(sorted(map(str, rounded)))
            yield f"its weights are in {kinds}, without fp32 ones"


def _names(where: Path, stored: Stored, model: RecipeModel) -> dict[str, str]:
    """The stored name of each parameter: transformers', or torchtitan's of llama."""
    if not any(key.endswith("tok_embeddings.weight") for key in stored):
        return {name: name for name in model.parameters}
    if model.config.model_type != "llama":
        raise CheckpointError(
            f"{where} has torchtitan's names, and model_type {model.config.model_type}",
            fix="of torchtitan's own models, llama is imported; its other ones can be exported "
            "to Hugging Face files, without optimizer states",
        )
    names = {}
    for name in model.parameters:
        names[name] = name
        for ours, theirs in _TORCHTITAN.items():
            names[name] = names[name].replace(ours, theirs)
    return names


def _halves(read: Callable[[], Tensor], heads: int) -> Tensor:
    """Rows in transformers' order: of each head the even ones, then the odd ones."""
    values = read()
    return values.view(heads, -1, 2, values.shape[1]).transpose(1, 2)


def _prefix_of_weights(where: Path, stored: Stored, name: str) -> str:
    """What precedes the names of the parameters."""
    found = {key.removesuffix(name) for key in stored if key.endswith(name)}
    found = {one for one in found if one == "" or one.endswith(".")}
    if len(found) != 1:
        raise CheckpointError(
            f"{where} holds {len(found) or 'no'} tensors that end in {name}: "
            f"{', '.join(sorted(found or stored)[:3])}, …",
            fix="state its model in model.config; parameters are found by transformers' names",
        )
    return found.pop()


def _prefix_of_states(where: Path, stored: Stored, names: Collection[str]) -> str:
    """What precedes the names of the parameters in the keys of their moments."""
    first, second = MOMENTS
    for name in names:
        end = f"{name}.{first}"
        found = {
            key.removesuffix(end)
            for key in stored
            if key.endswith(f".{end}") and f"{key.removesuffix(first)}{second}" in stored
        }
        if len(found) > 1:
            raise CheckpointError(f"{where} holds the states of several optimizers: {found}")
        if found:
            return found.pop()
    raise CheckpointError(
        f"{where} holds no states of AdamW",
        fix="save the optimizer, too: get_state_dict(model, optimizer) returns both; weights "
        "alone are exported with torch's dcp_to_torch_save",
    )


def _check_rest(
    where: Path, stored: Stored, prefix: str, state: str, names: Collection[str]
) -> None:
    """Refuse weights and states that the model does not have: it is another one, or another
    optimizer."""
    states = {key.removeprefix(state) for key in stored if key.startswith(state)}
    for key in sorted(states):
        name, _, quantity = key.rpartition(".")
        if name in names and quantity not in (*MOMENTS, STEP):
            raise CheckpointError(
                f"{where} has {quantity} of {name}, which AdamW does not keep",
                fix="AdamW's checkpoints can be continued; another optimizer's weights are a "
                "start, with model.init: pretrained",
            )
        if name not in names and quantity in MOMENTS:
            raise CheckpointError(
                f"{where} has {quantity} of {name}, the recipe's model has no such parameter",
                fix="state its model in model.config",
            )
    # Without a prefix, what else was saved is told from weights by the first part of its name.
    parts = {prefix} if prefix else {f"{name.partition('.')[0]}." for name in names}
    rest = {
        key.removeprefix(prefix)
        for key in stored
        if key.startswith((*parts,)) and not key.startswith(state)
    }
    rest -= {*names, "lm_head.weight"}  # of tied embeddings
    if more := sorted(name for name in rest if name.endswith((".weight", ".bias"))):
        raise CheckpointError(
            f"{where} has {', '.join(more[:3])}, the recipe's model does not",
            fix="state its model in model.config",
        )


def _reads(
    stored: Stored, name: str, shape: tuple[int, ...], prefix: str, state: str
) -> dict[str, Callable[[], Tensor]]:
    """What reads the weight, and the moments of a parameter that trains."""
    keys = {"weight": f"{prefix}{name}"}
    keys |= {one: key for one in MOMENTS if (key := f"{state}{name}.{one}") in stored}
    for key in keys.values():
        if key not in stored:
            raise CheckpointError(
                f"it has no {key}, which the recipe's model needs",
                fix="state its model in model.config",
            )
        found = stored[key].tensors[key].size
        if found != shape:
            raise CheckpointError(f"{key} has the shape {found}, the model needs {shape}")
    return {one: partial(stored[key].read, key) for one, key in keys.items()}


def _stored_object(reader: Reader, key: str) -> Any:
    """An object of a checkpoint, read as `load_pickle` reads a file."""
    with TemporaryDirectory() as copy:
        (Path(copy) / "object").write_bytes(reader.read_object(key))
        return load_pickle(Path(copy), "object")


def _parameter_groups(readers: Iterable[Reader], prefix: str) -> Groups:
    """What follows `prefix`, as `get_state_dict` names it: by the number of a group, or, when
    it is flattened, by the parameter."""
    groups: dict[str, dict[str, Any]] = {}
    for reader in readers:
        for key in reader.objects:
            name, _, option = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and option in _OPTIONS:
                groups.setdefault(name, {})[option] = _stored_object(reader, key)
    return groups
