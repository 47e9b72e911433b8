"""torch.distributed.checkpoint folders of a transformers model, e.g. of FSDP2 or Accelerate.

Tensors of a state dict are stored under the names of its nested keys, joined by dots. What
`get_state_dict` returns has a parameter's moments at `state.NAME.exp_avg`; what precedes these
names is up to the program that saved. torchtitan has names of its own for llama, whose rotary
positions turn neighbouring rows of a head where transformers turns its halves.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import CheckpointError
from toolkit.extras.imports.base import (
    ForeignCheckpoint,
    ForeignState,
    RecipeModel,
    StoredTensor,
    updates_of,
    whole_number,
)
from toolkit.extras.imports.compared import (
    OptimizerGroup,
    group_notes,
    group_settings,
    require_adamw,
)
from toolkit.extras.imports.torch_dist import FORMAT_FILE, METADATA, Reader
from toolkit.optimizers.base import MOMENTS

STEP, HEAD = "step", "lm_head.weight"
ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""The folders of a model and its optimizer under FSDP, also those of transformers' Trainer."""
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


def _matches(folder: Path) -> bool:
    """Also megatron-core writes these files, and one about the format in addition."""
    whole = (folder / METADATA).is_file() and not (folder / FORMAT_FILE).exists()
    return whole or all((folder / name / METADATA).is_file() for name in ACCELERATE)


def read(folder: Path, model: RecipeModel) -> ForeignState:
    """See `ForeignCheckpoint.read`. The step is the number of the optimizer's updates."""
    whole = (folder / METADATA).is_file()
    readers = [Reader(one) for one in ([folder] if whole else map(folder.joinpath, ACCELERATE))]
    stored = {key: reader for reader in readers for key in reader.tensors}
    names = _names(folder, stored, model)
    weights = _prefix_of_weights(folder, stored, next(iter(names)))
    states = _prefix_of_states(folder, stored, names)
    groups = _groups(readers, states, names)
    require_adamw(groups)
    updates = updates_of({
        whole_number(stored[key].read(key), key)
        for name in names
        if (key := f"{states}{name}.{STEP}") in stored
    })  # fmt: skip
    notes = [
        "its step is the number of its optimizer's updates: skipped steps are not stored",
        *group_notes(groups, model.parameters),
    ]
    keys = [key for name in names if (key := f"{weights}{name}") in stored]
    dtypes = {stored[key].tensors[key].dtype for key in keys}
    if rounded := dtypes - {torch.float32}:
        notes.append(
            f"its weights are in {', '.join(sorted(map(str, rounded)))}, without fp32 ones"
        )
    return ForeignState(
        updates,
        updates,
        _parameters(stored, names, weights, states, model),
        settings=group_settings(groups),
        notes=tuple(notes),
    )


DCP = ForeignCheckpoint(
    title="torch.distributed.checkpoint",
    files=f"{METADATA} and *.distcp, or the folders {' and '.join(ACCELERATE)}",
    matches=_matches,
    read=read,
)


def _names(where: Path, stored: Stored, model: RecipeModel) -> dict[str, str]:
    """Stored names of the parameters, transformers' or torchtitan's, and transformers'."""
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
        own = name
        for ours, theirs in _TORCHTITAN.items():
            own = own.replace(ours, theirs)
        names[own] = name
    return names


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
    found = set()
    for key in stored:
        parts = key.removesuffix(f".{first}").split(".")
        if f"{'.'.join(parts)}.{second}" in stored and key.endswith(f".{first}"):
            ends = [n for n in range(1, len(parts)) if ".".join(parts[n:]) in names]
            found |= {".".join(parts[:n]) for n in ends[:1]}
    if len(found) > 1:
        raise CheckpointError(f"{where} holds the states of several optimizers: {found}")
    if not found:
        raise CheckpointError(
            f"{where} holds no states of AdamW",
            fix="save the optimizer, too: get_state_dict(model, optimizer) returns both; "
            "weights alone are exported with torch's dcp_to_torch_save",
        )
    return f"{found.pop()}."


def _parameters(
    stored: Stored, names: Mapping[str, str], weights: str, states: str, model: RecipeModel
) -> dict[str, dict[str, StoredTensor]]:
    """Every weight and state, also of parameters that the model does not have."""
    # Without a prefix, what else was saved is told from weights by the first part of its name.
    parts = {weights} if weights else {f"{name.partition('.')[0]}." for name in names}
    found: dict[str, dict[str, StoredTensor]] = {}
    for key, reader in stored.items():
        if key.startswith(states):
            name, _, quantity = key.removeprefix(states).rpartition(".")
            known = quantity != STEP if name in names else quantity in MOMENTS
        else:
            name, quantity = key.removeprefix(weights), "weight"
            known = name in names or (
                key.startswith((*parts,)) and name.endswith((".weight", ".bias"))
            )
        if known:
            ours, read = names.get(name, name), partial(reader.read, key)
            heads = next((own for part, own in _TURNED.items() if part in ours), None)
            if heads is not None and ours != name:
                read = partial(_halves, read, getattr(model.config, heads))
            found.setdefault(ours, {})[quantity] = StoredTensor(reader.tensors[key].size, read)
    if HEAD not in model.parameters and found.get(HEAD, {}).keys() == {"weight"}:
        del found[HEAD]  # of tied embeddings
    return found


def _halves(read: Callable[[], Tensor], heads: int) -> Tensor:
    """Rows in transformers' order: of each head the even ones, then the odd ones."""
    values = read()
    return values.view(heads, -1, 2, values.shape[1]).transpose(1, 2)


def _groups(
    readers: Iterable[Reader], states: str, names: Mapping[str, str]
) -> list[OptimizerGroup]:
    """The optimizer's groups as `get_state_dict` names their options: by the number of a group,
    or, when it is flattened, by the parameter."""
    prefix = f"{states.removesuffix('state.')}param_groups."
    groups: dict[str, dict[str, Any]] = {}
    for reader in readers:
        for key in reader.objects:
            group, _, option = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and option in _OPTIONS and states.endswith("state."):
                groups.setdefault(group, {})[option] = reader.read_object(key)
    return [
        OptimizerGroup(
            [names[one] for one in options.get("params", [group]) if one in names], options
        )
        for group, options in groups.items()
    ]
