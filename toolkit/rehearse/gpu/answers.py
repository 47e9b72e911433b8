"""Answers what fake tensors cannot: their elements, and what other ranks would say."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor

_aten, _c10d = torch.ops.aten, torch.ops.c10d


def run(func: Any, args: Any, kwargs: Any, routed: float) -> Any:
    """The result of an operator: a number is 1, and a flag, whether something is wrong, is
    False; tensors that are compared are equal; a mask selects `routed` of the elements, as that
    of the experts that get a token does."""
    if func is _aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
        kind = args[0].dtype
        if kind in (torch.bool, torch.uint8):
            return False
        return 1.0 if kind.is_floating_point else 1
    if func is _aten.equal.default:
        return True
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
    """What does the same with each pair of tensors; fake tensors know no coalesced operator."""

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

_CPU_ADAM = SimpleNamespace(
    create_adam=lambda *_: 0, destroy_adam=lambda *_: 0, adam_update=lambda *_: 0
)
"""DeepSpeed's update on the host, which would have to be compiled, and reads elements."""


def before(engine: str) -> None:
    """Import the engine of this path, and let its libraries compile nothing."""
    models = import_module(engine.partition(":")[0])
    if hasattr(models, "import_deepspeed"):
        models.import_deepspeed()
        adam: Any = import_module("deepspeed.ops.adam.cpu_adam")
        adam.CPUAdamBuilder = lambda: SimpleNamespace(load=lambda: _CPU_ADAM)


def replace() -> None:
    """Replace functions of the imported libraries that need elements or other ranks.

    Each of megatron-core's experts gets the same number of tokens; DeepSpeed's ranks, which
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
    """What the dispatcher's tensor would hold; see its `preprocess` for their meaning."""
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
