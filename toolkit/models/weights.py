"""Initial weights, one parameter range at a time, the same in every layout.

A weight source returns elements `[start, stop)` of the flattened parameter `name`. A rank reads
only the elements that it holds, so no rank ever needs the whole model, and the values do not
depend on the rank.

`RandomWeights` draws them from (seed, name, position); `SafetensorsWeights` reads them
from a Hugging Face folder. Names are those of Hugging Face checkpoints. Transformers
keeps the experts of a layer in one stacked parameter while checkpoints hold one tensor
per expert; `checkpoint_names` maps one to the other. For families whose published checkpoints
also hold the stack, a tensor per expert is a slice of it.
"""

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.errors import DataError, PlanError
from toolkit.models.families import FAMILIES, family_of
from toolkit.models.families.tensors import Block, overlaps
from toolkit.models.safetensors_folder import SafetensorsFolder

BLOCK = 1 << 18
"""Elements drawn from one random stream. Fixed: changing it would change the weights."""

DRAWN_AT_ONCE = 1 << 24
"""Elements that `RandomWeights.read_block` holds while it cuts out columns."""


_CORRECTION_BIAS = "e_score_correction_bias"


def is_correction_bias(name: str) -> bool:
    """Whether this tensor is a router's correction bias: an fp32 buffer that is part of the
    model and not trained by gradients."""
    return name.rpartition(".")[2] == _CORRECTION_BIAS


def correction_biases(model: nn.Module) -> dict[str, Tensor]:
    """The correction biases of a transformers model's routers, by name."""
    return {name: b for name, b in model.named_buffers() if is_correction_bias(name)}


class WeightSource(Protocol):
    """A source of initial weights."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters and correction biases of the transformers model."""
        ...

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`: 1-D, on the CPU."""
        ...

    def read_block(self, block: Block) -> Tensor:
        """A rectangle of a checkpoint tensor, in the block's orientation, on the CPU."""
        ...


@dataclass(frozen=True)
class Piece:
    """A checkpoint tensor that makes up part of a flattened parameter."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return prod(self.shape)


_OF_STACK = re.compile(r"\.experts\.(\d+)\.\w+$")
"""A tensor per expert that is a slice of a published stack, and the expert's number."""


def is_of_stack(name: str) -> bool:
    """Whether this checkpoint tensor is one expert's slice of a stack, as in published
    checkpoints."""
    return _OF_STACK.search(name) is not None


def weight_name(model: nn.Module, name: str, shape: Sequence[int]) -> str:
    """The name that weights have for parameter `name` of a transformers model.

    Its own name, except for the experts of a family whose published checkpoints also stack
    them: `….experts.gate_up_proj` is `….experts.stack.gate_up_proj`.
    """
    parent, _, own = name.rpartition(".")
    if not parent.endswith(".experts") or len(shape) < 2:
        return name
    config: Any = model.config
    return f"{parent}.stack.{own}" if family_of(config.model_type).stacked_experts else name


def checkpoint_names(name: str, shape: Sequence[int]) -> list[Piece]:
    """The checkpoint tensors that, flattened one after the other, are parameter `name`, called
    as `weight_name` does.

    Nearly always one tensor of the same name. For stacked experts, `gate_up_proj`
    [experts, 2·intermediate, hidden] is gate and up of expert 0, then of expert 1, …;
    `down_proj` [experts, hidden, intermediate] is one tensor per expert. Where published
    checkpoints stack them, too, every parameter is one tensor per expert, in its own shape.
    """
    if stack := re.fullmatch(r"(.*\.experts)\.stack\.(\w+)", name):
        slices = (f"{stack[1]}.{expert}.{stack[2]}" for expert in range(shape[0]))
        return [Piece(one, tuple(shape[1:])) for one in slices]
    match = re.fullmatch(r"(.*\.mlp)\.experts\.(gate_up_proj|down_proj)", name)
    if not match or len(shape) != 3:
        return [Piece(name, tuple(shape))]
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
    piece = shape[1] // len(parts), shape[2]
    return [
        Piece(f"{match[1]}.experts.{expert}.{part}.weight", piece)
        for expert in range(shape[0])
        for part in parts
    ]


def _overlaps(
    pieces: Sequence[Piece], start: int, stop: int
) -> Iterator[tuple[Piece, int, int]]:
    """The part of each piece that lies inside [start, stop) of their concatenation."""
    return overlaps(pieces, lambda piece: piece.numel, start, stop)


@dataclass(frozen=True)
class _Place:
    """The position of a checkpoint tensor inside a model's flattened parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]


class CheckpointTensors:
    """The positions of a model's checkpoint tensors in its flattened parameters.

    `shapes` are the model's parameters; the names are those of `checkpoint_names`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self._places: dict[str, _Place] = {}
        for parameter, shape in shapes.items():
            start = 0
            for piece in checkpoint_names(parameter, shape):
                self._places[piece.name] = _Place(parameter, start, piece.shape)
                start += piece.numel

    def flat_rows(self, block: Block) -> tuple[str, int, int, int]:
        """Parameter, first and last element, and row length of the rows that hold `block`."""
        place = self._places[block.tensor]
        rows = block.stored.rows
        length = prod(place.shape[1:])
        start = place.start + rows[0] * length
        return place.parameter, start, place.start + rows[1] * length, length


# --- random ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fill:
    """Initialisation of a range of elements: normal(mean, std), constant if std is 0."""

    start: int
    stop: int
    mean: float
    std: float


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records how transformers initialises each (meta) parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {
            id(p): weight_name(model, name, p.shape) for name, p in model.named_parameters()
        }
        self.fills: dict[str, list[_Fill]] = {}
        self.others: dict[str, nn.Module] = {}
        """Parameters that are initialised in another way, and the module that does it."""
        self.initialize: Any = model._init_weights
        self._module: nn.Module = model
        for part in model.modules():
            if hasattr(part, "_init_weights"):  # each nested model uses its own
                part._init_weights = self._of_module  # type: ignore[assignment]

    def _of_module(self, module: nn.Module) -> None:
        self._module = module
        self.initialize(module)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operation = func.overloadpacket.__name__
        if operation.endswith("_") and isinstance(args[0], Tensor):
            target = args[0]
            base = target if target._base is None else target._base
            name = self.names.get(id(base))
            if name is not None:
                self._record(name, operation, target, base.numel(), args[1:])
        return result

    def _record(
        self, name: str, operation: str, target: Tensor, numel: int, values: tuple[Any, ...]
    ) -> None:
        if operation == "normal_":
            mean, std = values  # transformers always states both
        elif operation in ("fill_", "zero_"):
            mean, std = (values[0] if values else 0.0), 0.0
        else:
            self.others[name] = self._module
            return
        start = int(target.storage_offset())
        fill = _Fill(start, start + int(target.numel()), float(mean), float(std))
        if fill.stop - fill.start == numel:
            self.fills[name] = [fill]
            self.others.pop(name, None)
        else:
            self.fills.setdefault(name, []).append(fill)


class RandomWeights:
    """Weights with the distribution that transformers gives each parameter.

    `meta_model` is the transformers model on the meta device. Its own initialisation runs there
    without values, and only the distributions are recorded. Parameters with other distributions
    than normal or constant (a state-space model's decay rates) are initialised completely by
    their own module whenever a part is requested.

    Raises PlanError for a model that initialises a parameter only in its constructor.
    """

    def __init__(self, meta_model: nn.Module, seed: int) -> None:
        self.seed = seed
        self.shapes = {
            weight_name(meta_model, name, p.shape): tuple(p.shape)
            for name, p in meta_model.named_parameters()
        }
        for module in meta_model.modules():
            if hasattr(module, "_is_hf_initialized"):
                del module._is_hf_initialized
        self._modules = {id(part): name for name, part in meta_model.named_modules()}
        recorder = _Recorder(meta_model)
        with recorder:
            meta_model.initialize_weights()  # type: ignore[operator]
        self._initialize = recorder.initialize
        self.fills, self.others = recorder.fills, recorder.others
        for name, bias in correction_biases(meta_model).items():
            self.shapes[name] = tuple(bias.shape)
            self.fills[name] = [_Fill(0, bias.numel(), 0.0, 0.0)]
        self._drawn: tuple[str, dict[str, Tensor]] = "", {}
        self.tensors = CheckpointTensors(self.shapes)
        missing = [n for n in self.shapes if n not in self.fills and n not in self.others]
        if missing:
            raise PlanError(
                f"the model does not initialise {', '.join(missing[:3])}",
                fix="use `model.init: pretrained`",
            )

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter: float32 [stop - start]."""
        if name in self.others:
            return self._own(name)[start:stop]
        out = np.empty(stop - start, dtype=np.float32)
        pieces = checkpoint_names(name, self.shapes[name])
        for fill in self.fills[name]:
            low, high = max(start, fill.start), min(stop, fill.stop)
            if low >= high:
                continue
            view = out[low - start : high - start]
            if fill.std == 0.0:
                view[:] = fill.mean
                continue
            position = 0
            for piece, first, last in _overlaps(pieces, low, high):
                part = view[position : position + last - first]
                _standard_normal(self.seed, piece, first, part)
                position += last - first
            view *= np.float32(fill.std)
            view += np.float32(fill.mean)
        return torch.from_numpy(out)

    def _own(self, name: str) -> Tensor:
        """The flattened parameter `name` as its module initialises it, after the seed."""
        module = self.others[name]
        path = self._modules[id(module)]
        if self._drawn[0] != path:
            real = deepcopy(module).to_empty(device="cpu")
            digest = blake2b(f"{self.seed}\0{path}".encode(), digest_size=8).digest()
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(int.from_bytes(digest, "little", signed=True))
                self._initialize(real)
            dot = "." if path else ""
            values = {f"{path}{dot}{n}": p.flatten() for n, p in real.named_parameters()}
            self._drawn = path, {n: values[n] for n in self.others if n in values}
        return self._drawn[1][name]

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`; the block's rows are drawn a few at a time."""
        return _cut(block, self)


def _cut(block: Block, source: "RandomWeights | ResizedWeights") -> Tensor:
    """A rectangle of what `source` reads, a few rows at a time."""
    name, start, stop, length = source.tensors.flat_rows(block)
    each, apart = block.stored.steps
    if block.columns is None:
        return source.read(name, start, stop)[::each]
    low, high = block.stored.columns or (0, length)
    step = max(1, DRAWN_AT_ONCE // length) * length
    parts = [
        source.read(name, first, min(first + step, stop)).view(-1, length)[:, low:high:apart]
        for first in range(start, stop, step)
    ]
    columns = (parts[0] if len(parts) == 1 else torch.cat(parts))[::each]
    return columns.T if block.transposed else columns


def _standard_normal(seed: int, piece: Piece, start: int, out: "np.ndarray[Any, Any]") -> None:
    """Fill `out` with elements [start, start + len(out)) of the piece's random stream.

    Each block of BLOCK elements has its own counter-based generator, keyed by the seed,
    the tensor's name and the block's index, so any range can be drawn on its own, and blocks
    in several threads: as many as PyTorch has on this rank.
    """
    stop = start + len(out)

    def draw(block: int) -> None:
        first = block * BLOCK
        last = min(first + BLOCK, piece.numel)
        digest = blake2b(f"{seed}\0{piece.name}\0{block}".encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        values = generator.standard_normal(last - first, dtype=np.float32)
        low, high = max(start, first), min(stop, last)
        out[low - start : high - start] = values[low - first : high - first]

    blocks = range(start // BLOCK, -(-stop // BLOCK))
    if len(blocks) == 1:
        draw(blocks[0])
        return
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        deque(threads.map(draw, blocks), maxlen=0)  # raises what a thread raised


# --- more rows than are stored ---------------------------------------------------------


class ResizedWeights:
    """The weights of `source` in a model with more rows of embedding and head.

    A new row is the mean of the source's rows plus noise with 1e-9 of each column's variance,
    drawn from the seed, the tensor's name and the element's position. This is what
    transformers' `resize_token_embeddings` does, but for the correlation of the columns' noise.
    """

    def __init__(
        self, source: WeightSource, shapes: Mapping[str, tuple[int, ...]], seed: int
    ) -> None:
        self.source, self.shapes, self.seed = source, shapes, seed
        self.tensors = CheckpointTensors(shapes)
        self._old_rows: dict[str, tuple[Any, Any]] = {}
        """Mean and standard deviation of the columns, float32, of the tensors read so far."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """See `WeightSource.read`; old rows in the source's dtype, if no new ones follow."""
        held = prod(self.source.shapes[name])
        if stop <= held:
            return self.source.read(name, start, stop)
        new = self._new(name, max(start, held), stop)
        return new if start >= held else torch.cat([self.source.read(name, start, held), new])

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`."""
        if self.source.shapes.get(block.tensor) == self.shapes.get(block.tensor):
            return self.source.read_block(block)
        return _cut(block, self)

    def _new(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._old_rows:
            self._old_rows[name] = self._columns(name)
        mean, deviation = self._old_rows[name]
        values = np.empty(stop - start, dtype=np.float32)
        _standard_normal(self.seed, Piece(name, self.shapes[name]), start, values)
        columns = np.arange(start, stop) % len(mean)
        return torch.from_numpy(mean[columns] + _NOISE * deviation[columns] * values)

    def _columns(self, name: str) -> tuple[Any, Any]:
        """See `_old_rows`; numpy adds row after row, the same on all ranks."""
        rows, *rest = self.source.shapes[name]
        length = prod(rest)
        step = max(1, DRAWN_AT_ONCE // length)
        total = squares = np.zeros(length)
        for first in range(0, rows, step):
            last = min(first + step, rows)
            values = self.source.read(name, first * length, last * length).double().numpy()
            total = total + values.reshape(-1, length).sum(axis=0)
            squares = squares + np.square(values).reshape(-1, length).sum(axis=0)
        mean = total / rows
        deviation = np.sqrt(np.maximum(squares / rows - mean**2, 0.0))
        return mean.astype(np.float32), deviation.astype(np.float32)


_NOISE = np.float32(1e-9**0.5)
"""Standard deviation of new rows, relative to that of the old ones; transformers' number."""


# --- pretrained -----------------------------------------------------------------------


TIED_HEAD = "lm_head.weight"
"""The output projection, which is the embedding itself in a model with tied embeddings."""

_BUFFER = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|(attn|attention)\.(masked_)?bias)")
"""Rotary frequencies and causal masks, which older releases of transformers saved."""

_COMPARED_ELEMENTS = 1 << 24


class SafetensorsWeights:
    """Weights read from the safetensors of a Hugging Face folder, never by pickle.

    `shapes` are the parameters of the model to fill; `base_prefix` is the name under
    which it holds its decoder (some checkpoints leave it out); `config_name` is how to
    call the model's config in a message. Every parameter is looked up in advance, so a
    checkpoint that does not match is refused before anything is loaded.

    Raises DataError for missing or damaged files, missing tensors, wrong shapes, and tensors
    that the model does not have, except `buffers`.
    """

    def __init__(
        self,
        folder: Path,
        shapes: dict[str, tuple[int, ...]],
        base_prefix: str = "",
        config_name: str = "`model.config`",
    ) -> None:
        self.folder = folder
        self.shapes = shapes
        self.base_prefix = base_prefix
        self.config_name = config_name
        self.stored = SafetensorsFolder(folder)
        self._check()
        self.buffers = self._other_tensors()
        """Stored names of tensors that models compute themselves."""

    @property
    def files(self) -> dict[str, str]:
        """The stored name of every tensor in the folder → file name."""
        return self.stored.files

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter, in the checkpoint's dtype."""
        pieces = self._pieces(name, self.shapes[name])
        parts = [
            self._read_piece(piece.name, low, high)
            for piece, low, high in _overlaps(pieces, start, stop)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        """The stored tensors of a parameter: some models' experts are also stored stacked."""
        stacked = self.find(name) is not None
        return [Piece(name, shape)] if stacked else checkpoint_names(name, shape)

    def _read_piece(self, name: str, start: int, stop: int) -> Tensor:
        """Read only the rows that hold [start, stop)."""
        tensor_slice = self._slice(name)
        shape = tensor_slice.get_shape()
        row = prod(shape[1:])
        first, last = start // row, -(-stop // row)
        rows: Tensor = tensor_slice[first:last]
        return self._finite(name, rows).reshape(-1)[start - first * row : stop - first * row]

    def _finite(self, name: str, values: Tensor) -> Tensor:
        finite: Tensor = self.stored.finite(self.stored_name(name), values)
        return finite

    def read_block(self, block: Block) -> Tensor:
        """See `WeightSource.read_block`; only the rectangle is read."""
        tensor, stored = self._slice(block.tensor), block.stored
        each, apart = stored.steps
        if stored.columns is None:
            vector: Tensor = self._finite(block.tensor, tensor[slice(*stored.rows)])
            return vector[::each]
        # Files are read without gaps.
        rectangle: Tensor = tensor[slice(*stored.rows), slice(*stored.columns)]
        rectangle = self._finite(block.tensor, rectangle)[::each, ::apart]
        return rectangle.T if block.transposed else rectangle

    def _slice(self, name: str) -> Any:
        part, expert = self.stored.part(self.stored_name(name)), _OF_STACK.search(name)
        return _Slice(part, int(expert[1])) if expert else part

    def stored_name(self, name: str) -> str:
        """The checkpoint's own name of a tensor. Raises DataError if it has none."""
        stored = self.find(name)
        if stored is None:
            raise DataError(f"{self.folder} has no tensor {name}", fix=self._check_config)
        return stored

    def find(self, name: str) -> str | None:
        """The checkpoint's own name of a tensor; None when it has none."""
        candidates = [name, name.removeprefix(f"{self.base_prefix}.")]
        candidates += [family.published_name(name) for family in FAMILIES.values()]
        return next((found for found in candidates if found in self.files), None)

    def stored_copy(self, head: str, embedding: str) -> str | None:
        """The stored name of a tied head; None when only the embedding is stored.

        Both are read, some rows at a time. Raises DataError when they differ, in which
        case transformers does not tie them, whatever the config says.
        """
        stored = self.find(head)
        if stored is None:
            return None
        copy, original = self._slice(head), self._slice(embedding)
        shape = tuple(original.get_shape())
        step = max(1, _COMPARED_ELEMENTS // prod(shape[1:]))
        same = (copy.get_dtype(), tuple(copy.get_shape())) == (original.get_dtype(), shape)
        if not same or not all(
            torch.equal(copy[row : row + step], original[row : row + step])
            for row in range(0, shape[0], step)
        ):
            raise DataError(
                f"{self.folder}: {stored} is not the same as {embedding}, but the config ties "
                "them; transformers would not",
                fix="set tie_word_embeddings: false in its config.json",
            )
        return stored

    def _other_tensors(self) -> list[str]:
        """Raise DataError if additional stored tensors are not buffers."""
        names = [p.name for item in self.shapes.items() for p in self._pieces(*item)]
        mine = {self.find(name) for name in (*names, TIED_HEAD)}
        others = sorted(name for name in self.files if name not in mine)
        if weights := [name for name in others if not _BUFFER.fullmatch(name)]:
            more = f" and {len(weights) - 3} more" if len(weights) > 3 else ""
            raise DataError(
                f"{self.folder} holds {', '.join(weights[:3])}{more}, which the model does not "
                "have",
                fix=self._check_config,
            )
        return others

    @property
    def _check_config(self) -> str:
        return f"check that {self.config_name} describes this checkpoint"

    def _check(self) -> None:
        counted: Counter[str] = Counter()
        for name, shape in self.shapes.items():
            pieces = self._pieces(name, shape)
            for piece in pieces:
                found = tuple(self._slice(piece.name).get_shape())
                counted[self.stored_name(piece.name)] += piece.numel
                wrong = found != shape if len(pieces) == 1 else prod(found) != piece.numel
                if wrong:
                    raise DataError(
                        f"{self.folder}: {piece.name} has shape {found}, the model needs "
                        f"{shape if len(pieces) == 1 else piece.numel}",
                        fix=self._check_config,
                    )
        for stored, numel in counted.items():
            shape = tuple(self.stored.part(stored).get_shape())
            if prod(shape) != numel:
                raise DataError(
                    f"{self.folder}: {stored} has shape {shape}, the model needs {numel} "
                    "elements",
                    fix=self._check_config,
                )


class _Slice:
    """One expert's part of a stack in a file, sliceable like safetensors' tensors."""

    def __init__(self, stack: Any, expert: int) -> None:
        self._stack = stack
        self._expert = expert

    def get_shape(self) -> list[int]:
        """Its shape, without the experts."""
        shape: list[int] = self._stack.get_shape()[1:]
        return shape

    def __getitem__(self, places: slice | tuple[slice, ...]) -> Tensor:
        """A part of it."""
        places = places if isinstance(places, tuple) else (places,)
        part: Tensor = self._stack[(self._expert, *places)]
        return part
