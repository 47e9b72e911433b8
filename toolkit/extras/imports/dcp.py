"""torch.distributed.checkpoint folders of a transformers model, e.g. of FSDP2 or Accelerate.

Tensors of a state dict are stored under the names of its nested keys, joined by dots. What
`get_state_dict` returns has a parameter's moments at `state.NAME.exp_avg`; what precedes these
names is up to the program that saved.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import CheckpointError
from toolkit.extras.imports.state import (
    FLAGS,
    ForeignState,
    RecipeModel,
    Shapes,
    StoredTensor,
    count,
    updates,
)
from toolkit.extras.imports.torch_dist import FORMAT_FILE, METADATA, Reader
from toolkit.optimizers.base import MOMENTS

STEP, HEAD = "step", "lm_head.weight"
ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""The folders of a model and its optimizer under FSDP, also those of transformers' Trainer."""
TITLE = "torch.distributed.checkpoint"
FILES = f"{METADATA} and *.distcp, or the folders {' and '.join(ACCELERATE)}"
_OPTIONS = {"betas", "eps", "weight_decay", *FLAGS}
Stored = Mapping[str, Reader]
"""Every stored tensor's reader, by its key."""


def matches(folder: Path) -> bool:
    """Also megatron-core writes these files, and one about the format in addition."""
    whole = (folder / METADATA).is_file() and not (folder / FORMAT_FILE).exists()
    return whole or all((folder / name / METADATA).is_file() for name in ACCELERATE)


def read(folder: Path, model: RecipeModel) -> ForeignState:
    """The state. Its step is the number of the optimizer's updates. Raises CheckpointError for
    what is damaged, malicious or not supported."""
    whole = (folder / METADATA).is_file()
    readers = [Reader(one) for one in ([folder] if whole else map(folder.joinpath, ACCELERATE))]
    stored = {key: reader for reader in readers for key in reader.tensors}
    names = model.parameters
    weights = _prefix_of_weights(folder, stored, next(iter(names)))
    states = _prefix_of_states(folder, stored, names)
    groups = _groups(readers, states)
    steps = [key for name in names if (key := f"{states}{name}.{STEP}") in stored]
    step = updates({count(stored[key].read(key), key) for key in steps})
    notes = ["its step is the number of its optimizer's updates: skipped steps are not stored"]
    keys = [key for name in names if (key := f"{weights}{name}") in stored]
    dtypes = {stored[key].tensors[key].properties.dtype for key in keys}
    if rounded := dtypes - {torch.float32}:
        notes.append(
            f"its weights are in {', '.join(sorted(map(str, rounded)))}, without fp32 ones"
        )
    parameters = _parameters(stored, names, weights, states)
    return ForeignState(step, step, parameters, groups, notes=tuple(notes))


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


def _prefix_of_states(where: Path, stored: Stored, names: Shapes) -> str:
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
    stored: Stored, names: Shapes, weights: str, states: str
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
            size = tuple(reader.tensors[key].size)
            found.setdefault(name, {})[quantity] = StoredTensor(size, partial(reader.read, key))
    if HEAD not in names and found.get(HEAD, {}).keys() == {"weight"}:
        del found[HEAD]  # of tied embeddings
    return found


def _groups(readers: Iterable[Reader], states: str) -> list[dict[str, Any]]:
    """The optimizer's groups as `get_state_dict` names their options: by the number of a group,
    or, when it is flattened, by the parameter."""
    prefix = f"{states.removesuffix('state.')}param_groups."
    groups: dict[str, dict[str, Any]] = {}
    for reader in readers:
        for key in reader.objects:
            group, _, option = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and option in _OPTIONS and states.endswith("state."):
                groups.setdefault(group, {})[option] = reader.read_object(key)
    return [*groups.values()]
