"""The tensors that transformers saves of a model: their names, and what they hold of it.

When transformers loads a checkpoint, it renames tensors, stacks experts and fuses projections,
and it takes them apart when it saves one, by a table of its own for each type of model. Here it
converts tensors without values, and what it makes of them tells the names.
"""

from collections import defaultdict
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from toolkit.models.weights import Piece, correction_biases, weight_name


def saved_tensors(model: PreTrainedModel) -> dict[str, tuple[Piece, ...]]:
    """Every tensor of the meta `model`'s `state_dict`, by its name in weights, with the tensors
    of a checkpoint that, flattened one after the other, are its elements.

    Of tied parameters, the one that transformers saves is written, whichever the model names
    first. A model of which transformers mixes the elements of a tensor (hrm_text,
    inkling2_text) keeps its own names, which transformers loads as well.
    """
    tensors = model.state_dict() | correction_biases(model)
    empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    whole = {name: (Piece(name, tuple(tensor.shape)),) for name, tensor in empty.items()}
    saved: dict[str, tuple[Piece, ...]] = _in_order(model, empty) or {**whole}
    for name, _ in model.named_parameters():
        saved[name] = saved[model.all_tied_weights_keys.get(name, name)]
    return {weight_name(model, name, empty[name].shape): saved[name] for name in empty}


def _in_order(
    model: PreTrainedModel, empty: dict[str, Tensor]
) -> dict[str, tuple[Piece, ...]] | None:
    """See `saved_tensors`; None where a saved tensor is no range of a parameter's elements."""
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in empty.items()}
    ranges: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    with torch.no_grad(), _WithoutCopies():  # type: ignore[no-untyped-call]
        converted = revert_weight_conversion(model, dict(empty))
    for name, part in converted.items():
        owner = owners.get(part.untyped_storage()._cdata)
        if owner is None or not part.is_contiguous():
            return None
        ranges[owner].append((int(part.storage_offset()), Piece(name, tuple(part.shape))))
    saved = {
        owner: tuple(piece for _, piece in sorted(found, key=lambda each: each[0]))
        for owner, found in ranges.items()
    }
    numels = {name: sum(piece.numel for piece in pieces) for name, pieces in saved.items()}
    return saved if numels == {n: prod(t.shape) for n, t in empty.items()} else None


class _WithoutCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A copy that keeps the order of the elements is the tensor itself, so what is cut out of a
    parameter still says where: by its storage and its place in there."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        copied = args[0] if func is torch.ops.aten.clone.default else None
        if copied is not None and sorted(copied.stride(), reverse=True) == [*copied.stride()]:
            return copied.view_as(copied)
        return func(*args, **(kwargs or {}))
