"""Fakes a GPU in this process: torch.cuda and collectives.

Everything here lasts until the process ends, and nothing is computed.
"""

import contextlib
import math
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh, distributed_c10d
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.utils import import_utils

GPU = torch.device("cuda", 0)
MEMORY_BYTES = 80 * 2**30
CAPABILITY = (9, 0)
"""Compute capability of an H100, whose kernels the engines would choose."""


class Idle:
    """A CUDA stream or event without pending work."""

    device, device_type = GPU, 1
    device_index = stream_id = cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self, *_: object) -> None: ...

    record = wait = wait_stream = wait_event = synchronize

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "Idle | None" = None) -> "Idle":
        return event or Idle()

    def elapsed_time(self, _: object) -> float:
        return 0.0


class _Generator:
    """A random stream that is always in the same state."""

    def get_state(self) -> Tensor:
        return torch.empty(16, dtype=torch.uint8)

    def set_state(self, _: object) -> None: ...

    def manual_seed(self, _: int) -> None: ...

    def initial_seed(self) -> int:
        return 0


_DEFAULT = Idle()


def _within(stream: Idle | None) -> contextlib.AbstractContextManager[Any]:
    return stream or contextlib.nullcontext()


def pretend() -> FakeTensorMode:
    """Make torch report a GPU; returns the mode under which its tensors are fake. Engines are
    imported afterwards."""
    os.environ["DS_ACCELERATOR"] = GPU.type
    _have_cuda()
    _have_accelerator()
    _send_nothing()
    functional.scaled_dot_product_attention = _attention
    _replace(torch, rms_norm=_rms_norm)
    import_utils.is_fake_tensor = lambda _: False  # transformers would take it for compiled
    # Otherwise, tensors made from numbers would begin on the host and initialise CUDA.
    _replace(FakeTensorMode, avoid_device_init=property(lambda _: True))
    mode: Any = FakeTensorMode
    return mode(allow_non_fake_inputs=False)  # type: ignore[no-any-return]


def _replace(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _swap(old: Tensor, new: Tensor) -> None:
    """Replaces `Module.to` for fake parameters, which fails if other references to them
    exist."""
    if isinstance(old, FakeTensor) and isinstance(new, FakeTensor) and not old.is_meta:
        if old.dtype != new.dtype:
            old.data = new.data
        old.fake_device = new.device
    else:
        _swap_tensors(old, new)  # type: ignore[no-untyped-call]


_swap_tensors = torch.utils.swap_tensors


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The kernel that a GPU uses: flash in 16 bits without a mask, otherwise the
    memory-efficient one, which does not support grouped heads.

    (For fake tensors torch uses plain products.) Raises RuntimeError if a GPU has neither.
    """
    del enable_gqa
    if attn_mask is None and query.dtype != torch.float32:
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )
        return found[0]  # type: ignore[no-any-return]
    if query.shape[1] != key.shape[1]:
        raise RuntimeError("grouped heads with a mask or in fp32: all scores would be kept")
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )
    return found[0]  # type: ignore[no-any-return]


class _FusedRmsNorm(torch.autograd.Function):
    """CUDA's kernel, which keeps its input and one number per row."""

    @staticmethod
    def forward(context: Any, rows: Tensor, weight: Tensor | None, width: int) -> Tensor:
        scales = rows.new_empty(rows.numel() // width, dtype=torch.float32)
        context.save_for_backward(rows, weight, scales)
        return torch.empty_like(rows)

    @staticmethod
    def backward(context: Any, *_: Any) -> Any:
        rows, weight, _ = context.saved_tensors
        of_weight = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(rows), of_weight, None


_single_operators = torch.rms_norm


def _rms_norm(
    rows: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """torch's, which takes single operators where types are mixed, and without CUDA."""
    if weight is not None and weight.dtype != rows.dtype:
        return _single_operators(rows, normalized_shape, weight, eps)
    found: Tensor = _FusedRmsNorm.apply(  # type: ignore[no-untyped-call]
        rows, weight, math.prod(normalized_shape)
    )
    return found


_WITHOUT_EFFECT = (
    *("_lazy_init", "init", "set_device", "reset_peak_memory_stats", "empty_cache"),
    *("manual_seed", "manual_seed_all", "set_rng_state", "set_stream", "synchronize"),
)
_EMPTY = "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"


def _have_cuda() -> None:
    """Functions of torch.cuda that the engines and their libraries use."""
    properties = types.SimpleNamespace(
        name="fake",
        total_memory=MEMORY_BYTES,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=132,
    )
    answers: dict[str, Callable[..., Any]] = {
        **{name: _nothing() for name in _WITHOUT_EFFECT},
        **dict.fromkeys(_EMPTY, lambda *_: 0),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "fake",
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_stats": lambda *_: {},
        "Stream": Idle,
        "Event": Idle,
        "current_stream": lambda *_: _DEFAULT,
        "default_stream": lambda *_: _DEFAULT,
        "stream": _within,
        "device": lambda _: contextlib.nullcontext(),
        "get_rng_state": lambda *_, **__: _Generator().get_state(),
    }
    for name, answer in answers.items():
        for module in (torch.cuda, torch.cuda.random):
            if hasattr(module, name):
                setattr(module, name, answer)


def _have_accelerator() -> None:
    """Functions elsewhere in torch."""
    _replace(torch.cuda, default_generators=(_Generator(),))
    _replace(torch.cuda.nvtx, range_push=_nothing(), range_pop=_nothing(), mark=_nothing())
    _replace(torch._C, _cuda_getCurrentRawStream=lambda _: 0)
    _replace(torch.utils, swap_tensors=_swap)
    _replace(
        torch,
        Event=Idle,
        get_rng_state=lambda: _Generator().get_state(),
        set_rng_state=_nothing(),
    )
    _replace(
        torch.accelerator,
        current_stream=lambda *_: _DEFAULT,
        set_stream=_nothing(),
        synchronize=_nothing(),
    )
    _replace(Tensor, record_stream=_nothing(), pin_memory=lambda self, *_: self)


def _nothing() -> Callable[..., None]:
    """A function that does nothing; torch.compile wants each name to have its own."""
    return lambda *_, **__: None


def join(rank: int, world: int) -> None:
    """Join a process group of which this is the only process."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def _send_nothing() -> None:
    """Groups of torch's fake backend; objects are as if every rank had the same."""
    create: Any = distributed_c10d.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return create(*arguments, **options | {"backend": "fake"})

    def really(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            with unset_fake_temporarily():  # a mesh holds the numbers of ranks
                return make(*arguments, **options)

        return made

    def all_gather_object(found: list[Any], value: Any, **_: object) -> None:
        found[:] = [value] * len(found)

    _replace(dist, all_gather_object=all_gather_object, broadcast_object_list=_nothing())
    for module in (dist, distributed_c10d):
        _replace(module, new_group=new_group)
    mesh = device_mesh.DeviceMesh
    _replace(mesh, from_group=really(mesh.from_group))
    _replace(device_mesh, init_device_mesh=really(device_mesh.init_device_mesh))
