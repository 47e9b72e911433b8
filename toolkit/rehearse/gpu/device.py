"""Fakes a GPU in this process: torch.cuda, collectives, and what libraries ask of other ranks.

Everything here lasts until the process ends, and nothing is computed.
"""

import contextlib
import math
import os
import sys
import types
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
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

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Idle":
        return self

    def __exit__(self, *_: object) -> None: ...

    def synchronize(self, *_: object) -> None: ...

    record = wait_stream = wait_event = synchronize

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: "Idle | None" = None) -> "Idle":
        return event or Idle()


class _Generator:
    """A random stream that is always in the same state."""

    def get_state(self) -> Tensor:
        return torch.empty(16, dtype=torch.uint8)

    def set_state(self, _: object) -> None: ...


_DEFAULT = Idle()


def _within(stream: Idle | None) -> contextlib.AbstractContextManager[Any]:
    return stream or contextlib.nullcontext()


def pretend() -> FakeTensorMode:
    """Make torch report a GPU. Returns the mode under which its tensors are fake. Engines are
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
    *("set_device", "reset_peak_memory_stats", "empty_cache", "manual_seed", "synchronize"),
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
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "memory_stats": lambda *_: {},
        "Stream": Idle,
        "Event": Idle,
        "current_stream": lambda *_: _DEFAULT,
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
    _replace(torch.cuda.nvtx, range_push=_nothing(), range_pop=_nothing())
    _replace(torch._C, _cuda_getCurrentRawStream=None)  # inductor reads it when it is imported
    _replace(torch.utils, swap_tensors=_swap)
    _replace(
        torch,
        Event=Idle,
        get_rng_state=lambda: _Generator().get_state(),
        set_rng_state=_nothing(),
    )
    _replace(torch.accelerator, current_stream=lambda *_: _DEFAULT)
    _replace(Tensor, record_stream=_nothing(), pin_memory=lambda self, *_: self)


def _nothing() -> Callable[..., None]:
    """A function that does nothing. torch.compile wants each name to have its own."""
    return lambda *_, **__: None


def join(rank: int, world: int) -> None:
    """Join a process group of which this is the only process."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)


def _send_nothing() -> None:
    """Groups of torch's fake backend. Objects are as if every rank had the same."""
    create: Any = distributed_c10d.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return create(*arguments, **options | {"backend": "fake"})

    mesh = device_mesh.init_device_mesh

    def new_mesh(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():  # it holds the numbers of ranks
            return mesh(*arguments, **options)

    def all_gather_object(found: list[Any], value: Any, **_: object) -> None:
        found[:] = [value] * len(found)

    _replace(dist, all_gather_object=all_gather_object)
    for module in (dist, distributed_c10d):
        _replace(module, new_group=new_group)
    _replace(device_mesh, init_device_mesh=new_mesh)


_CPU_ADAM = types.SimpleNamespace(create_adam=lambda *_: 0, adam_update=lambda *_: 0)
"""DeepSpeed's update on the host, which would have to be compiled, and reads elements."""


def import_engine(engine: str) -> None:
    """Import the engine of this path, and let its libraries compile nothing."""
    models = import_module(engine.partition(":")[0])
    if hasattr(models, "import_deepspeed"):
        models.import_deepspeed()
        adam: Any = import_module("deepspeed.ops.adam.cpu_adam")
        adam.CPUAdamBuilder = lambda: types.SimpleNamespace(load=lambda: _CPU_ADAM)


def answer_libraries() -> None:
    """Replace functions of the imported libraries that need elements or other ranks.

    Each of megatron-core's experts gets the same number of tokens. DeepSpeed's ranks, which
    compare the order of their layers, agree.
    """
    for module, name, value in (
        ("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", _counts),
        (
            "deepspeed.runtime.zero.partitioned_param_coordinator",
            "assert_ints_same_as_other_ranks",
            lambda _: None,
        ),
    ):
        if module in sys.modules:
            setattr(sys.modules[module], name, value)


def _counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What the dispatcher's tensor would hold. See its `preprocess` for their meaning."""
    del as_numpy, record_stream
    if not torch.is_tensor(tensor):
        return tensor
    tensor.to("cpu", non_blocking=True)  # as the original, so that it is found
    dispatcher = sys._getframe(1).f_locals["self"]
    routed = dispatcher.routing_map.shape[0] * dispatcher.config.moe_router_topk
    each, local = routed // dispatcher.num_experts, dispatcher.num_local_experts
    sent = each * local
    meanings = {
        "input_splits": sent,
        "output_splits": sent,
        "output_splits_tp": sent * dispatcher.ep_size,
        "num_global_tokens_per_local_expert": each,
    }
    value = each * dispatcher.tp_size * dispatcher.ep_size
    for name, meant in meanings.items():
        if getattr(dispatcher, name, None) is tensor:
            value = meant
    return np.full(tuple(tensor.shape), value)
