"""A GPU that ran out of memory: recognised in every form, and what held the memory."""

import re

import torch

from toolkit.errors import RunFailed
from toolkit.text.units import GIB

_OUT_OF_MEMORY = re.compile(r"out of memory|_STATUS_\w*ALLOC\w*_FAILED", re.IGNORECASE)
"""Text in the errors of PyTorch's allocator, CUDA, NCCL, Triton, cuBLAS and cuDNN."""
_FIX = (
    "--set training.micro_batch_size=1, --set parallel.recompute=full, "
    "--set parallel.zero.stage=3, or offload (parallel.zero.offload_optimizer=cpu); "
    "for long sequences --set parallel.context=2"
)


def out_of_memory(error: Exception, doing: str, *, retry: bool) -> RunFailed | None:
    """`error` as one that states what the rank was doing and what held the memory; None if
    memory did not run out. `retry`: whether another start may get further."""
    if not _OUT_OF_MEMORY.search(str(error)):
        return None
    said = str(error).strip().partition("\n")[0]
    held = f": {_held()}" if torch.cuda.is_available() else ""
    message = f"out of memory in phase '{doing}'{held} ({type(error).__name__}: {said})"
    return RunFailed(message, fix=_FIX, retry=retry)


def _held() -> str:
    """What holds the memory of this rank's GPU."""
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    sizes = f"{allocated / GIB:.2f} GiB allocated, {reserved / GIB:.2f} GiB reserved"
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:  # the driver itself has no memory left, or no context
        return sizes
    outside = (total - free - reserved) / GIB
    return (
        f"{sizes}, {outside:.2f} GiB outside of PyTorch's allocator, of {total / GIB:.2f} GiB"
    )
