"""torch.distributed.checkpoint folders of a transformers model, e.g. of FSDP2 or Accelerate.

Tensors of a state dict are stored under the names of its nested keys, joined by dots. In the
dict that `get_state_dict` returns, a parameter's moments are at `state.NAME.exp_avg`. Each
program that saves chooses its own prefix of these names.
"""

from collections.abc import Collection, Iterable, Mapping
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
"""Folders of the model and the optimizer as Accelerate saves them under FSDP. transformers'
Trainer uses the same names."""
TITLE = "torch.distributed.checkpoint"
FILES = f"{METADATA} and *.distcp, or the folders {' and '.join(ACCELERATE)}"
_OPTIONS = {"betas", "eps", "weight_decay", *FLAGS}
Stored = Mapping[str, Reader]
"""Every stored tensor's reader, by its key."""


def matches(folder: Path) -> bool:
    """Whether the folder has this format, and no further file of megatron-core's."""
    whole = (folder / METADATA).is_file() and not (folder / FORMAT_FILE).exists()
    return whole or all((folder / name / METADATA).is_file() for name in ACCELERATE)


def read(folder: Path, model: RecipeModel) -> ForeignState:
    """Read the state. Its step is the number of optimizer updates. Raises CheckpointError for
    damaged, malicious or unsupported files."""
    whole = (folder / METADATA).is_file()
    readers = [Reader(one) for one in ([folder] if whole else map(folder.joinpath, ACCELERATE))]
    stored = {key: reader for reader in readers for key in reader.tensors}
    names = model.parameters
    weights = _prefix(folder, stored, [*names], "weights")
    states = _prefix(folder, stored, [f"{name}.{MOMENTS[0]}" for name in names], "moments")
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


def _prefix(where: Path, stored: Stored, ends: Collection[str], what: str) -> str:
    """The prefix of the first of these `ends` that any key has. Raises CheckpointError if none
    has, or if it has several prefixes."""
    for end in ends:
        keys = [key for key in stored if key == end or key.endswith(f".{end}")]
        if len(keys) > 1:
            raise CheckpointError(f"{where} holds {what} of several models: {', '.join(keys)}")
        if keys:
            return keys[0].removesuffix(end)
    raise CheckpointError(
        f"{where} holds no {what} under transformers' names: {', '.join(sorted(stored)[:3])}",
        fix="state its model in model.config, and save the optimizer, too: get_state_dict("
        "model, optimizer) returns both; dcp_to_torch_save exports weights alone",
    )


def _parameters(
    stored: Stored, names: Shapes, weights: str, states: str
) -> dict[str, dict[str, StoredTensor]]:
    """Find every weight and state, also for parameters that the model does not have."""
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
    """The optimizer's groups with their options. `get_state_dict` names an option by the number
    of its group. If flattened, it names it by the parameter."""
    prefix = f"{states.removesuffix('state.')}param_groups."
    groups: dict[str, dict[str, Any]] = {}
    for reader in readers:
        for key in reader.objects:
            group, _, option = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and option in _OPTIONS and states.endswith("state."):
                groups.setdefault(group, {})[option] = reader.read_object(key)
    return [*groups.values()]
