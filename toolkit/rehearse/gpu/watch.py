"""Detects operations of a training step that a GPU's step should not contain, and their
location."""

import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.rehearse.gpu import device
from toolkit.rehearse.gpu.account import Account
from toolkit.rehearse.gpu.findings import (
    HOST_WAITS,
    MIXED,
    NOT_NCCL,
    WIDENED,
    Collective,
    GpuFinding,
    RankFindings,
)

_FRAMES = 3
_HERE = Path(__file__).parent
_LIBRARIES = ("torch", "contextlib.py", "functools.py", "cuda_accelerator.py")
_aten = torch.ops.aten
_COPIES = (_aten._to_copy.default, _aten.copy_.default)
_PROMOTING = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inspects every operator while it is entered."""

    def __init__(
        self,
        compute: torch.dtype,
        is_layer: Callable[[nn.Module], bool],
        selects: float = 0.0,
    ) -> None:
        """`compute`: what is computed in; `is_layer`: is a module a decoder layer; `selects`:
        the share of its experts that a token is sent to."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = RankFindings()
        self.account = Account()
        self.begin("build")
        self._compute = compute
        self._is_layer = is_layer
        self._selects = selects
        self._listing = False
        """A read of all numbers of a tensor."""
        self._inside = 0
        """Of how many decoder layers the forward pass is running."""
        self._pinned: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        """Tensors in pinned memory; of a view of one it is not known."""

    def begin(self, phase: str) -> None:
        """What follows belongs to `phase`."""
        self.phase = phase
        self.account.begin(phase)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does with its parts comes here, too
        kwargs = kwargs or {}
        out = self._run(func, args, kwargs)
        if kwargs.get("pin_memory"):
            self._pinned[out] = True
        self.account.note(func, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten._local_scalar_dense.default:
            return self._number(args[0])
        if func is _aten.masked_select.default:
            return self._selected(*args)
        if func is _aten.equal.default:
            return self._equal(*args)
        if func in _COPIES:
            self._copy(func, args, kwargs)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args)
            if func in _COALESCED:
                return _COALESCED[func](*args)
        elif self._inside and func in _PROMOTING:
            self._promotion(func, args)
        elif func is _aten.detach.default and type(args[0]) is Tensor and args[0].is_meta:
            # torch.tensor(…, device="meta") is not a fake one: a buffer of gemma's embedding.
            mode = detect_fake_mode()
            assert mode is not None
            args = (mode.from_tensor(args[0]),)
        self._mixture(func, args, kwargs)
        return func(*args, **kwargs)

    def _number(self, tensor: Tensor) -> Any:
        """The value of a scalar tensor, which fake ones lack: 1, or False for a flag."""
        if tensor.device.type == "cuda" and not self._listing:
            self._add(HOST_WAITS, "reads a number")
        kind = tensor.dtype
        flag = kind in (torch.bool, torch.uint8)  # whether something is wrong
        return False if flag else 1.0 if kind.is_floating_point else 1

    def _equal(self, tensor: Tensor, _: Tensor) -> bool:
        """Tensors that are compared, to find out if something is wrong, are equal."""
        if tensor.device.type == "cuda":
            self._add(HOST_WAITS, "compares tensors")
        return True

    def _selected(self, tensor: Tensor, _: Tensor) -> Tensor:
        """The number of elements that a mask selects, which only the GPU knows: those of the
        experts that get a token."""
        self._add(HOST_WAITS, "selects by a mask")
        return tensor.new_empty(round(tensor.numel() * self._selects))

    def _copy(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        source, target = args[0].device, kwargs.get("device") or args[0].device
        blocks = not kwargs.get("non_blocking", False)
        if func is _aten.copy_.default:
            source, target = args[1].device, args[0].device
            blocks = not (len(args) > 2 and args[2]) and blocks
        kinds = torch.device(source).type, torch.device(target).type
        if kinds == ("cuda", "cpu"):
            # What follows needs the values, also where it says no; not of a save's own buffers.
            if blocks or args[0] not in self._pinned:
                self._add(HOST_WAITS, "copies to the host")
        elif kinds == ("cpu", "cuda") and blocks:
            self._add(HOST_WAITS, "copies from the host, without non_blocking")

    def _collective(self, func: Any, args: Sequence[Any]) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        group = _group_of(args)
        if group is None:
            return
        backend = device.backends.get(group.group_name, "nccl")
        name = func.overloadpacket.__name__
        on_host = name != "barrier"  # whose tensor says nothing
        if on_host and "gloo" not in backend and any(t.device.type == "cpu" for t in tensors):
            self._add(NOT_NCCL, name)
        ranks = dist.get_process_group_ranks(group)
        if "nccl" in backend and len(ranks) > 1:
            self.found.communicators[group.group_name] = len(ranks)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.found.collectives.append(
            Collective(name, f"{backend} {_listed(ranks)}", len(ranks), nbytes, self.phase)
        )

    def _promotion(self, func: Any, args: Sequence[Any]) -> None:
        """A 16-bit tensor with an fp32 one, which makes all fp32.

        Not with one number per token: the factor of its experts is fp32 in every mixture.
        """
        tensors = (one for one in args if isinstance(one, Tensor) and one.dim() > 1)
        types = {one.dtype for one in tensors if one.shape[-1] > 1}
        if self._compute != torch.float32 and types == {self._compute, torch.float32}:
            self._add(WIDENED, func.overloadpacket.__name__)

    def _mixture(self, func: Any, args: Any, kwargs: Any) -> None:
        """What a fake tensor refuses, with its place."""
        if func in _COPIES or func.namespace != "aten":
            return
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, FakeTensor)]
        # torch takes numbers, also those in tensors without dimensions, from the host.
        kinds = {one.device.type for one in tensors if one.dim()}
        name = func.overloadpacket.__name__
        if len(kinds) > 1 and "index" not in name:  # it takes indices in host memory, too
            self._add(MIXED, f"{name}: {' and '.join(sorted(kinds))}")

    def _add(self, what: str, how: str) -> None:
        self.found.findings.append(GpuFinding(what, how, _place(), self.phase))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Also looks into decoder layers, and at tensors that are made from numbers."""
        handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enters),
            nn.modules.module.register_module_forward_hook(self._leaves, always_call=True),
        ]
        make, read = torch.tensor, FakeTensor.tolist

        def made(*arguments: Any, **options: Any) -> Tensor:
            if torch.device(options.get("device") or "cpu").type == "cuda":
                self._add(HOST_WAITS, "makes a tensor from numbers")
            return make(*arguments, **options)

        torch.tensor = made

        def listed(tensor: FakeTensor) -> Any:  # which a GPU's copies to the host once
            if tensor.device.type == "cuda":
                self._add(HOST_WAITS, "reads numbers")
            self._listing = True
            try:
                return read(tensor)
            finally:
                self._listing = False

        FakeTensor.tolist = listed  # type: ignore[method-assign,assignment]
        device.on_wait.append(self._waits)
        try:
            with self.account.following(), self:
                yield
        finally:
            device.on_wait.remove(self._waits)
            torch.tensor = make
            FakeTensor.tolist = read  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()

    def _waits(self, what: str) -> None:
        self._add(HOST_WAITS, what)

    def _enters(self, module: nn.Module, arguments: Sequence[Any]) -> None:
        if self._is_layer(module):
            self._inside += 1
            self._stream(module, "takes", arguments)  # after what FSDP did to the one before

    def _leaves(self, module: nn.Module, _: object, output: Any) -> None:
        if not self._is_layer(module):
            return
        self._inside -= 1
        self._stream(module, "returns", output if isinstance(output, tuple) else (output,))

    def _stream(self, module: nn.Module, does: str, tensors: Sequence[Any]) -> None:
        """The residual stream, the first of `tensors`, in another dtype than the compute
        dtype."""
        stream = tensors[0] if tensors else None
        if isinstance(stream, Tensor) and stream.dtype != self._compute:
            number = getattr(module, "layer_idx", getattr(module, "layer_number", "?"))
            self._add(WIDENED, f"{type(module).__name__} {number} {does} {stream.dtype}")


def _one_by_one(operator: Any) -> Callable[..., Any]:
    """What does the same with each pair of tensors; fake tensors know no coalesced operator."""

    def run(outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any) -> Any:
        for pair in zip(outputs, inputs, strict=True):
            _, work = operator(*pair, *options)
        return work

    return run


def _all_reduce(tensors: Sequence[Tensor], group: Any, operation: Any, *_: Any) -> Any:
    return torch.ops.c10d.allreduce_(tensors, group, operation, None)[1]


_COALESCED = {
    torch.ops.c10d.allreduce_coalesced_.default: _all_reduce,
    torch.ops.c10d.allgather_into_tensor_coalesced_.default: _one_by_one(
        torch.ops.c10d._allgather_base_
    ),
    torch.ops.c10d.reduce_scatter_tensor_coalesced_.default: _one_by_one(
        torch.ops.c10d._reduce_scatter_base_
    ),
}


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup | None:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value)
            except (RuntimeError, TypeError):
                continue
        if isinstance(value, str) and value in device.backends:
            groups: Any = dist.distributed_c10d
            return groups._resolve_process_group(value)  # type: ignore[no-any-return]
    return None


def _listed(ranks: Sequence[int]) -> str:
    """`0,1` or `0,8,…,120`."""
    shown = [str(rank) for rank in ranks]
    return ",".join(shown if len(shown) <= 4 else [*shown[:2], "…", shown[-1]])


def _place() -> tuple[str, ...]:
    """The innermost frames outside of torch and this package; torch's if it called itself, as
    its thread of the backward pass does."""
    frames: list[str] = []
    of_torch: list[str] = []
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.parent == _HERE:
            continue
        library = path.name in _LIBRARIES or "torch" in path.parts
        (of_torch if library else frames).append(f"{path.name}:{frame.lineno} {frame.name}")
        if len(frames) == _FRAMES:
            break
    return tuple((frames or of_torch)[:_FRAMES])
