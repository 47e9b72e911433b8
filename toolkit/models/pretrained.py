"""Weights of a Hugging Face folder, under whatever names transformers has saved them.

When transformers loads a checkpoint, it renames tensors, stacks experts and fuses projections,
and it takes them apart when it saves one, by a table of its own for each type of model. Here it
converts tensors without values, and what it makes of them tells the names.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from toolkit.errors import DataError
from toolkit.models.families.tensors import Block, overlaps
from toolkit.models.safetensors import SafetensorsFolder
from toolkit.models.weights import (
    READ_AT_ONCE,
    Piece,
    checkpoint_names,
    correction_biases,
    places_of,
    read_rectangle,
    shapes_of,
    weight_name,
)

_BUFFER = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)")
"""Rotary frequencies and causal masks, which older releases of transformers saved."""


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
    """See `saved_tensors`. None where a saved tensor is no range of a parameter's elements."""
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


class SafetensorsWeights:
    """Weights read from the safetensors of a Hugging Face folder, never by pickle.

    A parameter of the meta `model` that is not stored as transformers saves it has its own
    name, or those of `checkpoint_names`. Every parameter is looked up in advance, so a
    checkpoint that does not match is refused before anything is loaded.

    Raises DataError for missing or damaged files, missing tensors, wrong shapes, and tensors
    that the model does not have, except buffers with the values of `compute_buffers`.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        compute_buffers: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self.folder = folder
        self.shapes = shapes_of(model)
        self.stored = SafetensorsFolder(folder)
        self._places = places_of(self.shapes)
        self._saved = saved_tensors(model)
        self._tied: Mapping[str, str] = model.all_tied_weights_keys
        self._prefix = f"{model.base_model_prefix}."
        self._pieces = {name: self._stored_pieces(name) for name in self.shapes}
        self._check_shapes()
        self.buffers = self._other_tensors(compute_buffers)
        """Stored names of tensors that models compute themselves."""

    @property
    def files(self) -> dict[str, str]:
        """The stored name of every tensor in the folder → file name."""
        return self.stored.files

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter, in the checkpoint's dtype."""
        parts = [
            self._read_piece(piece, low, high)
            for piece, low, high in overlaps(
                self._pieces[name], attrgetter("numel"), start, stop
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read_piece(self, piece: Piece, start: int, stop: int) -> Tensor:
        """Read only the rows that hold [start, stop)."""
        row = prod(piece.shape[1:])
        first, last = start // row, -(-stop // row)
        rows: Tensor = self.stored.part(piece.name)[first:last]
        rows = self.stored.finite(piece.name, rows)
        return rows.reshape(-1)[start - first * row : stop - first * row]

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`."""
        return read_rectangle(block, self._places[block.tensor], self.read)

    def _stored_name(self, *names: str) -> str | None:
        """How a file calls the first of `names` that it has. Some checkpoints leave out the
        name of the decoder in the model."""
        ways = ((name, name.removeprefix(self._prefix)) for name in names)
        return next((one for way in ways for one in way if one in self.files), None)

    def _stored_whole(self, name: str) -> str | None:
        """How a file calls a parameter or buffer that transformers saves in one tensor."""
        return self._stored_name(*(piece.name for piece in self._saved.get(name, ())), name)

    def _stored_pieces(self, name: str) -> list[Piece]:
        """The stored tensors of a parameter. Raises DataError if any is missing."""
        shape = self.shapes[name]
        ways = self._saved[name], [Piece(name, shape)], checkpoint_names(name, shape)
        for way in ways:
            pieces = [(self._stored_name(piece.name), piece.shape) for piece in way]
            if all(stored is not None for stored, _ in pieces):
                return [Piece(stored, shape) for stored, shape in pieces if stored is not None]
        missing = next(piece.name for piece in ways[0] if not self._stored_name(piece.name))
        raise DataError(f"{self.folder} has no tensor {missing}", fix=self._check_config)

    def check_tied(self) -> None:
        """Compare each tied head that is stored with its embedding, some rows at a time.

        Raises DataError when they differ: transformers then does not tie them, whatever the
        config says.
        """
        for head, embedding in self._tied.items():
            stored, first = self._stored_whole(head), self._stored_whole(embedding)
            if stored is None or first is None:
                continue
            copy, original = self.stored.part(stored), self.stored.part(first)
            shape = tuple(original.get_shape())
            step = max(1, READ_AT_ONCE // prod(shape[1:]))
            same = (copy.get_dtype(), tuple(copy.get_shape())) == (original.get_dtype(), shape)
            if not same or not all(
                torch.equal(copy[row : row + step], original[row : row + step])
                for row in range(0, shape[0], step)
            ):
                raise DataError(
                    f"{self.folder}: {stored} is not the same as {embedding}, but the config "
                    "ties them; transformers would not",
                    fix="set tie_word_embeddings: false in its config.json",
                )

    def _other_tensors(self, compute_buffers: Callable[[], Mapping[str, Tensor]]) -> list[str]:
        """Raise DataError if additional stored tensors are not buffers as the model computes
        them."""
        mine = {piece.name for pieces in self._pieces.values() for piece in pieces}
        mine.update(filter(None, map(self._stored_whole, self._tied)))
        others = sorted(self.files.keys() - mine)
        weights = [name for name in others if not _BUFFER.fullmatch(name)]
        computed = compute_buffers() if weights else {}
        for name in self._saved.keys() & computed:
            stored = self._stored_whole(name)
            if stored in weights and self._holds(stored, computed[name]):
                weights.remove(stored)
        if weights:
            more = f" and {len(weights) - 3} more" if len(weights) > 3 else ""
            raise DataError(
                f"{self.folder} holds {', '.join(weights[:3])}{more}, which the model does not "
                "have or computes otherwise",
                fix=self._check_config,
            )
        return others

    def _holds(self, stored: str, value: Tensor) -> bool:
        values: Tensor = self.stored.part(stored)[...]
        return torch.equal(values.float(), value.float())

    @property
    def _check_config(self) -> str:
        return (
            "check that `model.config` describes this checkpoint; if it does, save the model "
            "with transformers' save_pretrained(…, save_original_format=False)"
        )

    def _check_shapes(self) -> None:
        for piece in (piece for pieces in self._pieces.values() for piece in pieces):
            found = tuple(self.stored.part(piece.name).get_shape())
            if found != piece.shape:
                raise DataError(
                    f"{self.folder}: {piece.name} has shape {found}, the model needs "
                    f"{piece.shape}",
                    fix=self._check_config,
                )
