"""Memory of a rank's GPU, operator by operator, attributed to modules."""

import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.rehearse.gpu import (
    ACTIVATIONS,
    BACKWARD,
    BUFFERS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Peak,
)

BLOCK = 512
"""Bytes that PyTorch's allocator rounds a request up to (`kMinBlockSize`)."""
_PASSING = (ACTIVATIONS, BACKWARD, OTHER)
_COLLECTIVES, _SHAPES = "torch/distributed/fsdp/", "torch/distributed/tensor/_sharding_prop"
_aten, _c10d = torch.ops.aten, torch.ops.c10d
_OF_TORCH = ("torch/", "toolkit/rehearse/gpu/", "contextlib")


@dataclass(eq=False, slots=True)
class Held:
    """A storage on the GPU."""

    kind: str = OTHER
    place: str = ""
    """The module, or the code location."""
    nbytes: int = 0


class Account(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Storages on the GPU, from allocation until nothing refers to them.

    A storage is attributed to the module whose forward pass allocates it, otherwise to the
    code location.
    """

    def __init__(self, routed: float = 0.0) -> None:
        """`routed`: the share of its experts that a token is sent to."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._routed = routed
        self._events: list[tuple[int, Held]] = []
        """Bytes allocated, or freed below 0."""
        self._held: Any = WeakIdKeyDictionary()
        """What is held, by storage, while the storage is alive."""
        self._start = 0
        """The number of the first event that `peak` looks at. 0 before any step."""
        self._names: Any = weakref.WeakKeyDictionary()
        self._modules: list[nn.Module] = []
        """Modules whose forward passes are running, the innermost last."""

    def own(self, modules: Iterable[nn.Module]) -> None:
        """Weights, buffers and lasting gradients of a model that was built."""
        for module in modules:
            for name, part in module.named_modules():
                self._names[part] = _collapsed(name)
            for name, weight in module.named_parameters():
                held = [_local(weight), getattr(weight, "ds_tensor", None)]
                self._relabel(held, WEIGHTS, _collapsed(name))
                self._relabel([getattr(weight, "main_grad", None)], GRADIENTS, "main_grad")
            for name, buffer in module.named_buffers():
                self._relabel([buffer], BUFFERS, _collapsed(name))

    def begin(self) -> None:
        """Begin a step."""
        self._start = len(self._events)

    def peak(self) -> Peak:
        """The peak since the last `begin`."""
        totals = list(accumulate((size for size, _ in self._events), initial=0))
        last = max(range(self._start, len(totals)), key=totals.__getitem__)
        held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for size, one in self._events[:last]:
            held[one.kind][one.place] += size
        ranked = sorted(held.items(), key=lambda item: -item[1].total())
        holders = {kind: dict((+places).most_common()) for kind, places in ranked if +places}
        return Peak(totals[last], holders)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does with its parts comes here, too
        out = _result(func, args, kwargs or {}, self._routed)
        for one in tree_leaves(out):
            if isinstance(one, FakeTensor) and one.device.type == "cuda":
                self._see(one.untyped_storage(), func)
        if func.namespace == "c10d" and "gather" in func._opname:
            self._relabel(tree_leaves(args[0]), COMMUNICATION, self._place(), only=_PASSING)
        if func is torch.ops.aten.resize_.default:
            self._resized(args[0].untyped_storage())
        return out

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context that also tracks modules, optimizers and storages that change their size."""
        storages: Any = torch.UntypedStorage
        resize = storages.resize_

        def resized(storage: Any, size: int) -> Any:
            done = resize(storage, size)
            self._resized(storage)
            return done

        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._updates),
        ]
        storages.resize_ = resized
        try:
            with self:
                yield
        finally:
            storages.resize_ = resize
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: object) -> None:
        self._modules.append(module)

    def _leave(self, module: nn.Module, *_: object) -> None:
        while self._modules and self._modules.pop() is not module:
            pass  # one whose forward pass ended in an error that was caught

    def _updates(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """The weights that an optimizer is about to update, their gradients and states."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                self._relabel([_local(weight)], OPTIMIZER, "master weights", _PASSING)
                self._relabel([_local(weight.grad)], GRADIENTS, "gradients")
                states = [_local(one) for one in optimizer.state.get(weight, {}).values()]
                self._relabel(states, OPTIMIZER, "moments")

    def _relabel(
        self, tensors: Iterable[Any], kind: str, place: str, only: Sequence[str] = ()
    ) -> None:
        """Give storages another label, or those that have one of the kinds `only`."""
        for one in tensors:
            if isinstance(one, FakeTensor) and one.device.type == "cuda":
                held = self._see(one.untyped_storage(), None)
                if not only or held.kind in only:
                    shared = held.kind == kind and held.place != place
                    held.kind, held.place = kind, "in one buffer" if shared else place

    def _see(self, storage: Any, func: Any) -> Held:
        """A storage, which may be new, of the operator `func`.

        Tensors that DTensor creates to determine a shape are new each time: they have no
        storage on a GPU.
        """
        held: Held | None = self._held.get(storage)
        if held is None:
            label = self._label(func)
            held = Held(*label or ())
            if label is not None:
                self._held[storage] = held
                weakref.finalize(storage, self._change, held, 0).atexit = False
                self._resized(storage)
        return held

    def _resized(self, storage: Any) -> None:
        if (held := self._held.get(storage)) is not None:
            self._change(held, -(-storage.nbytes() // BLOCK) * BLOCK)

    def _change(self, held: Held, nbytes: int) -> None:
        if more := nbytes - held.nbytes:
            held.nbytes = nbytes
            self._events.append((more, held))

    def _label(self, func: Any) -> tuple[str, str] | None:
        """Kind and place of what is allocated now. None for what has a shape only."""
        code, inside = _code_location()
        if _SHAPES in inside:
            return None
        namespace = "" if func is None else func.namespace
        if _COLLECTIVES in inside or namespace in ("c10d", "_c10d_functional"):
            return COMMUNICATION, code
        if torch._C._current_autograd_node() is not None:
            return BACKWARD, self._place()
        if self._start and (self._modules or torch.is_grad_enabled()):
            return ACTIVATIONS, self._place()
        return OTHER, code

    def _place(self) -> str:
        """The current module. Outside of all modules, the code location."""
        if not self._modules:
            return _code_location()[0]
        module = self._modules[-1]
        return str(self._names.get(module, type(module).__name__))


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _collapsed(name: str) -> str:
    """Equal layers share a name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def _code_location() -> tuple[str, set[str]]:
    """`file.py function` of the innermost frame outside of torch, and which of the known parts
    of torch are inside of it."""
    frame: Any = sys._getframe(1)
    inside = set()
    while frame is not None:
        path = frame.f_code.co_filename
        inside |= {part for part in (_COLLECTIVES, _SHAPES) if part in path}
        if not any(part in path for part in _OF_TORCH):
            return f"{Path(path).name} {frame.f_code.co_name}", inside
        frame = frame.f_back
    return "", inside


def _result(func: Any, args: Any, kwargs: Any, routed: float) -> Any:
    """The result of an operator: a number is 1, and a flag, whether something is wrong, is
    False. A mask selects `routed` of the elements, as that of the experts that get a token
    does."""
    if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
        kind = args[0].dtype
        if kind in (torch.bool, torch.uint8):
            return False
        return 1.0 if kind.is_floating_point else 1
    if func is _aten.masked_select.default:
        return args[0].new_empty(round(args[0].numel() * routed))
    if func in _COALESCED:
        return _COALESCED[func](*args)
    if func is _aten.detach.default and type(args[0]) is Tensor and args[0].is_meta:
        # torch.tensor(…, device="meta") is not a fake one: a buffer of gemma's embedding.
        mode = detect_fake_mode()
        assert mode is not None
        args = (mode.from_tensor(args[0]),)
    return func(*args, **kwargs)


def _one_by_one(operator: Any) -> Callable[..., Any]:
    """Apply an operator to each pair of tensors. Fake tensors know no coalesced operator."""

    def run(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any) -> Any:
        for pair in zip(outputs, inputs, strict=True):
            _, work = operator(*pair, *options)
        return work

    return run


def _all_reduce(tensors: Sequence[Tensor], group: Any, operation: Any, *_: Any) -> Any:
    return _c10d.allreduce_(tensors, group, operation, None)[1]


_COALESCED = {
    _c10d.allreduce_coalesced_.default: _all_reduce,
    _c10d.allgather_into_tensor_coalesced_.default: _one_by_one(_c10d._allgather_base_),
    _c10d.reduce_scatter_tensor_coalesced_.default: _one_by_one(_c10d._reduce_scatter_base_),
}
