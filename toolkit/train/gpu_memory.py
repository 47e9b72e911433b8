"""The memory of ranks: its peaks, and a GPU that ran out of it, recognised in every form."""

import re
import resource
from typing import Any

import torch
import torch.distributed as dist

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
    """`error` as one that states what the rank was doing. torch's own has the sizes. None if
    memory did not run out. `retry`: whether another start may get further."""
    if not _OUT_OF_MEMORY.search(str(error)):
        return None
    said = str(error).strip().partition("\n")[0]
    message = f"out of memory in phase '{doing}' ({type(error).__name__}: {said})"
    return RunFailed(message, fix=_FIX, retry=retry)


def allocated_gib(device: torch.device) -> float | None:
    """Peak allocated memory of the fullest rank, in GiB. None on a CPU. Collective."""
    if device.type != "cuda":
        return None
    return most(device, torch.cuda.max_memory_allocated(device) / GIB)[0]


def peaks(device: torch.device) -> dict[str, Any]:
    """The memory fields of `RunMeasurement`, of the fullest rank. Collective.

    On a GPU: peak allocated memory, what the allocator reserved, what is outside of it (GiB),
    and the allocator's retries. On a CPU: the peak resident memory of a process.
    """
    if device.type != "cuda":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"process_gib": most(device, resident / GIB)[0]}
    free, total = torch.cuda.mem_get_info(device)
    *sizes, retries = most(
        device,
        torch.cuda.max_memory_allocated(device) / GIB,
        torch.cuda.max_memory_reserved(device) / GIB,
        (total - free - torch.cuda.memory_reserved(device)) / GIB,
        torch.cuda.memory_stats(device)["num_alloc_retries"],
    )
    names = "memory_gib", "reserved_gib", "outside_gib"
    return {**dict(zip(names, sizes, strict=True)), "retries": int(retries)}


def most(device: torch.device, *values: float) -> list[float]:
    """The largest of each value on any rank. Collective."""
    largest = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.tolist()
