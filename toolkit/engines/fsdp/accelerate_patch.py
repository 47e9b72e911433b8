"""What Accelerate lacks for engine `fsdp`, added to its class once per process.

A Trainer creates its own Accelerator from its arguments alone, and TRL creates those again from
their fields: there is no object of ours that either would keep. So this is added where all of
them pass.
"""

import functools
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@functools.cache
def complete_fsdp() -> None:
    """Let every Accelerator shard by FSDP2 as the engine fsdp does.

    Gradients are reduced in fp32, and CPUs shard, too: `AcceleratorState` (accelerate 1.15)
    reduces in the compute dtype, and leaves its plugin out where the kind of run is MULTI_CPU
    or NO.
    """
    initialise = AcceleratorState.__init__

    @functools.wraps(initialise)
    def complete(
        state: AcceleratorState,
        mixed_precision: str | None = None,
        *args: Any,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        **more: Any,
    ) -> None:
        plugin = None if AcceleratorState._shared_state else fsdp_plugin
        if plugin is not None:
            _set_policies(plugin, mixed_precision)
        initialise(state, mixed_precision, *args, fsdp_plugin=fsdp_plugin, **more)
        if plugin is not None and state.distributed_type in _LEFT_WHOLE:
            state.fsdp_plugin = plugin
            for one in (state, PartialState()):
                one.distributed_type = DistributedType.FSDP

    AcceleratorState.__init__ = complete


_LEFT_WHOLE = (DistributedType.NO, DistributedType.MULTI_CPU)


def _set_policies(plugin: FullyShardedDataParallelPlugin, precision: str | None) -> None:
    if plugin.mixed_precision_policy is None and precision in _DTYPES:
        plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=_DTYPES[precision], reduce_dtype=torch.float32
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not torch.cuda.is_available():
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
