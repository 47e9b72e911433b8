"""Replaces library functions that need tensor values or other ranks."""

import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

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


def answer() -> None:
    """Replace them in the imported libraries.

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
