"""Memory and FLOPs of a rank's GPU, operator by operator, attributed to modules."""

import math
import re
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.rehearse.gpu import device
from toolkit.rehearse.gpu.allocator import Allocator, Request, least, rounded
from toolkit.rehearse.gpu.findings import (
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

_PASSING = (ACTIVATIONS, BACKWARD, OTHER)
_COLLECTIVES, _SHAPES = "torch/distributed/fsdp/", "torch/distributed/tensor/_sharding_prop"
_OF_TORCH = ("torch/", "toolkit/rehearse/gpu/")
_RESIZES = torch.ops.aten.resize_.default


def _grouped_product(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of matrix products of rows in groups, from the shapes of the operands.

    [rows, k] × [groups, k, n]; [m, rows] × [rows, n], a product per group of rows; and
    [groups, m, k] × [k, rows].
    """
    return 2 * math.prod(b) * a[-2] if len(a) > len(b) else 2 * math.prod(a) * b[-1]


if torch.ops.aten._grouped_mm not in flop_registry:
    register_flop_formula(torch.ops.aten._grouped_mm)(_grouped_product)


@dataclass
class Account:
    """Storages on the GPU, from allocation until nothing refers to them, and floating-point
    operations.

    A storage is attributed to the module whose forward pass allocates it; in the backward pass,
    to the module whose autograd node runs.
    """

    flops: dict[str, Counter[str]] = field(default_factory=dict)
    """By phase and module, of matrix products and attention; attention counted in full."""
    _events: list[Request] = field(default_factory=list)
    """Bytes allocated or freed, with storage and stream."""
    _labels: list[tuple[str, str]] = field(default_factory=list)
    """Of each storage: kind, and module or place."""
    _sizes: list[int] = field(default_factory=list)
    _numbers: Any = field(default_factory=WeakIdKeyDictionary)
    _references: dict[int, Any] = field(default_factory=dict)
    _starts: dict[str, int] = field(default_factory=dict)
    """By phase, the number of its first event."""
    _names: Any = field(default_factory=weakref.WeakKeyDictionary)
    _modules: list[nn.Module] = field(default_factory=list)
    """Modules whose forward passes are running, the innermost last."""
    _made_nodes: dict[int, str] = field(default_factory=dict)
    """By the sequence number of an autograd node, the module that created it."""
    _phase: str = "build"

    def begin(self, phase: str) -> None:
        """Attribute following events to `phase`."""
        self._phase = phase
        self._starts[phase] = len(self._events)

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

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record an operator."""
        if func._overloadpacket in flop_registry:
            count = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
            self.flops.setdefault(self._phase, Counter())[self._module()] += count
        elif _backward_node() is None and torch.is_grad_enabled():
            self._module()
        for one in (out,) if isinstance(out, Tensor) else tree_leaves(out):
            if isinstance(one, FakeTensor) and one.device.type == "cuda":
                self._see(one.untyped_storage(), func)
        if func.namespace == "c10d" and "gather" in func._opname:
            self._relabel(tree_leaves(args[0]), COMMUNICATION, self._module(), only=_PASSING)
        if func is _RESIZES:
            self._resized(args[0].untyped_storage())

    def peak(self, phase: str) -> Peak:
        """The peak of a phase."""
        events = self._events
        start = self._starts[phase]
        stop = min([n for n in self._starts.values() if n > start], default=len(events))
        totals = list(accumulate((size for size, _, _ in events[:stop]), initial=0))
        last = max(range(start, stop + 1), key=totals.__getitem__)
        held: dict[str, Counter[str]] = {}
        for size, number, _ in events[:last]:
            kind, place = self._labels[number]
            held.setdefault(kind, Counter())[place] += size
        ranked = sorted(held.items(), key=lambda item: -item[1].total())
        holders = {
            kind: {place: size for place, size in places.most_common() if size}
            for kind, places in ranked
        }
        return Peak(totals[last], {kind: places for kind, places in holders.items() if places})

    def reserved(self, *, expandable: bool) -> tuple[int, int]:
        """Bytes that the allocator has reserved at the end, and the minimum it can work with.

        The last phase is replayed twice: the blocks that a step frees do not always fit the
        next one's requests.
        """
        phase = self._events[self._starts[self._phase] :]
        left: Counter[int] = Counter()
        for size, number, _ in phase:
            left[number] += size
        requests = self._events + [event for event in phase if not left[event[1]]]
        most = Allocator(expandable=expandable).replay(requests)
        return most, least(requests, most, expandable=expandable)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Also tracks modules, storages that change their size, and optimizers."""
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
            if not isinstance(one, FakeTensor) or one.device.type != "cuda":
                continue
            number = self._see(one.untyped_storage(), None)
            before = self._labels[number]
            if not only or before[0] in only:
                same = before[0] == kind and before[1] != place
                self._labels[number] = kind, "in one buffer" if same else place

    def _see(self, storage: Any, func: Any) -> int:
        """The index of a storage, which may be a new one."""
        number: int | None = self._numbers.get(storage)
        if number is None:
            number = len(self._labels)
            label = self._label(func)
            self._labels.append(label or (OTHER, ""))
            self._sizes.append(0)
            if label is not None:
                self._numbers[storage] = number
                self._references[number] = weakref.ref(storage, lambda _: self._gone(number))
                self._resized(storage)
        return number

    def _resized(self, storage: Any) -> None:
        number = self._numbers.get(storage)
        if number is not None:
            self._change(number, rounded(storage.nbytes()))

    def _gone(self, number: int) -> None:
        self._change(number, 0)
        self._references.pop(number, None)

    def _change(self, number: int, size: int) -> None:
        before = self._sizes[number]
        if size != before:
            self._sizes[number] = size
            for more in (-before, size):
                if more:
                    self._events.append((more, number, device.current_stream().stream_id))

    def _label(self, func: Any) -> tuple[str, str] | None:
        """None for tensors that DTensor creates to determine a shape, which have no storage."""
        place, inside = _place()
        if _SHAPES in inside:
            return None
        if _COLLECTIVES in inside or (
            func is not None and func.namespace in ("c10d", "_c10d_functional")
        ):
            return COMMUNICATION, place
        if _backward_node() is not None:
            return BACKWARD, self._module() or place
        if self._phase != "build" and (self._modules or torch.is_grad_enabled()):
            return ACTIVATIONS, self._module()
        return OTHER, place

    def _module(self) -> str:
        """The current module; outside of all modules, the code location."""
        node = _backward_node()
        if node is not None and not self._modules:
            return self._made_nodes.get(node._sequence_nr(), "")
        if self._modules:
            module = self._modules[-1]
            name: str = self._names.get(module, type(module).__name__)
        else:
            name, _ = _place()
        if node is None:  # the graph of what is computed again is not the one that is used
            made = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            self._made_nodes[made] = name
        return name


def _backward_node() -> Any:
    return torch._C._current_autograd_node()


def _local(tensor: Any) -> Any:
    """This rank's part of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _collapsed(name: str) -> str:
    """Equal layers share a name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name)


def _place() -> tuple[str, set[str]]:
    """`file.py function` of the innermost frame outside of torch, and which of the known parts
    of torch are inside of it."""
    frame = sys._getframe(1)
    inside = set()
    while frame is not None:
        path = frame.f_code.co_filename
        inside |= {part for part in (_COLLECTIVES, _SHAPES) if part in path}
        if not any(part in path for part in _OF_TORCH) and "contextlib" not in path:
            return f"{Path(path).name} {frame.f_code.co_name}", inside
        frame = frame.f_back  # type: ignore[assignment]
    return "", inside
