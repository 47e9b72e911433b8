"""Initial weights, one parameter range at a time, the same in every layout.

A weight source returns elements `[start, stop)` of the flattened parameter `name`. A rank reads
only the elements that it holds, so no rank ever needs the whole model, and the values do not
depend on the rank.

`RandomWeights` draws them from (seed, name, position). `SafetensorsWeights` (pretrained.py)
reads them from a Hugging Face folder. Names are those of Hugging Face checkpoints. Transformers
keeps the experts of a layer in one stacked parameter while checkpoints hold one tensor
per expert. `checkpoint_names` maps one to the other. For families whose published checkpoints
also hold the stack, a tensor per expert is a slice of it.
"""

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from toolkit.errors import PlanError
from toolkit.models.families.tensors import Block, overlaps

BLOCK = 1 << 18
"""Elements drawn from one random stream. Fixed: changing it would change the weights."""

READ_AT_ONCE = 1 << 24
"""Elements that `read_rectangle` holds while it cuts out columns."""


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
        """The number of elements."""
        return prod(self.shape)


def weight_name(model: nn.Module, name: str, shape: Sequence[int]) -> str:
    """The name that weights have for parameter `name` of a transformers model.

    Its own name, except for the experts of a family whose published checkpoints also stack
    them: `….experts.gate_up_proj` is `….experts.stack.gate_up_proj`.
    """
    parent, _, own = name.rpartition(".")
    if not parent.endswith(".experts") or len(shape) < 2:
        return name
    config: Any = model.config
    return f"{parent}.stack.{own}" if _stacks_experts(config.model_type) else name


@cache
def _stacks_experts(model_type: str) -> bool:
    """Whether transformers loads this type's experts as it holds them, without a conversion."""
    mapping = get_checkpoint_conversion_mapping(model_type) or []
    return not any(
        "experts.*" in pattern for each in mapping for pattern in each.source_patterns
    )


def checkpoint_names(name: str, shape: Sequence[int]) -> list[Piece]:
    """The checkpoint tensors that, flattened one after the other, are parameter `name`, called
    as `weight_name` does.

    Nearly always one tensor of the same name. For stacked experts, `gate_up_proj`
    [experts, 2·intermediate, hidden] is gate and up of expert 0, then of expert 1, ….
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


class Place(NamedTuple):
    """A checkpoint tensor in the flattened parameter that holds it."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def places_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Where the checkpoint tensors of parameters with these `shapes` are, by name."""
    places: dict[str, Place] = {}
    for parameter, shape in shapes.items():
        start = 0
        for piece in checkpoint_names(parameter, shape):
            places[piece.name] = Place(parameter, start, piece.shape)
            start += piece.numel
    return places


def read_rectangle(
    block: Block, place: Place, read: Callable[[str, int, int], Tensor]
) -> Tensor:
    """See `WeightSource.read_block`: the rows come from `read`, a few at a time."""
    length = prod(place.shape[1:])
    start, stop = (place.start + row * length for row in block.stored.rows)
    each, apart = block.stored.steps
    if block.columns is None:
        return read(place.parameter, start, stop)[::each]
    low, high = block.stored.columns or (0, length)
    step = max(1, READ_AT_ONCE // length) * length
    parts = [
        read(place.parameter, first, min(first + step, stop)).view(-1, length)
        for first in range(start, stop, step)
    ]
    columns = torch.cat([rows[:, low:high:apart] for rows in parts])[::each]
    return columns.T if block.transposed else columns


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter and correction bias of a transformers model."""
    shapes = {
        weight_name(model, name, p.shape): tuple(p.shape)
        for name, p in model.named_parameters()
    }
    return shapes | {name: tuple(b.shape) for name, b in correction_biases(model).items()}


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
        self.shapes = shapes_of(meta_model)
        self._places = places_of(self.shapes)
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
            self.fills[name] = [_Fill(0, bias.numel(), 0.0, 0.0)]
        self._drawn: tuple[str, dict[str, Tensor]] = "", {}
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
            for piece, first, last in overlaps(pieces, attrgetter("numel"), low, high):
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
        """See `WeightSource.read_block`."""
        return read_rectangle(block, self._places[block.tensor], self.read)


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
