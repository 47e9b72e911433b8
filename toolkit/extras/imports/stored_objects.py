"""Objects among the tensors of a torch.distributed.checkpoint."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from toolkit.extras.convert.torch_dist import Reader
from toolkit.extras.imports.pickles import load_pickle

Groups = Mapping[str, Mapping[str, Any]]
"""Options of an optimizer's parameter groups; a group may be one parameter, by its name."""
_OPTIONS = {
    "params", "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize",
    "decoupled_weight_decay", "bias_correction",
}  # fmt: skip


def stored_object(reader: Reader, key: str, classes: Iterable[str] = ()) -> Any:
    """An object of a checkpoint, read as `load_pickle` reads a file."""
    with TemporaryDirectory() as copy:
        (Path(copy) / "object").write_bytes(reader.read_object(key))
        return load_pickle(Path(copy), "object", classes)


def parameter_groups(readers: Iterable[Reader], prefix: str) -> Groups:
    """What follows `prefix`, as `get_state_dict` names it: by the number of a group, or, when
    it is flattened, by the parameter."""
    groups: dict[str, dict[str, Any]] = {}
    for reader in readers:
        for key in reader.objects:
            name, _, option = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and option in _OPTIONS:
                groups.setdefault(name, {})[option] = stored_object(reader, key)
    return groups
