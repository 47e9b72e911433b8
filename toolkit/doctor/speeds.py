"""One rank of a calibration: measures matrix products, memory and communication.

    python -m toolkit.doctor.speeds RESULT.json

All ranks measure at the same time, as they compute in training: they share the memory's
bandwidth, and each has its share of the cores. Rank 0 prints on standard error what it found
and writes the result.
"""

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from toolkit.engines.distributed import Ranks, end_process, join, leave
from toolkit.errors import EXIT_DONE, EXIT_FAILED
from toolkit.text.terminal import tell

BUDGET_S = 2.5
"""How long one quantity is measured."""
COLLECTIVES = 20
"""How often a collective is repeated."""
PARTS = 8
"""The first product has factors with one in so many rows and columns."""
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """How large the measured operations are: large enough that starting them costs nothing."""

    matrix: int
    """Rows and columns of a factor."""
    stream_bytes: int
    """Bytes of one of three tensors, beyond any cache."""
    message_bytes: int
    """Bytes of a collective."""


CPU_SIZES = Sizes(2048, 128 * MIB, 32 * MIB)
GPU_SIZES = Sizes(8192, 1024 * MIB, 256 * MIB)


@dataclass(frozen=True)
class Speeds:
    """The speed of one of `processes` processes while all work."""

    processes: int
    matmul_flops: dict[str, float]
    """FLOP/s of large matrix products, by precision."""
    memory_bytes_per_s: float
    """Read and written by an elementwise operator on tensors that no cache holds."""
    link_bytes_per_s: float | None
    """Between neighbours of a ring in a large all-reduce. None for one process."""


class Bench:
    """Times operations on all ranks at once."""

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.device
        self.world = ranks.world

    def seconds(self, operation: Callable[[], object], repeats: int = 0) -> float:
        """Seconds of an operation, averaged over the ranks. A collective is repeated equally
        often on all ranks, others for BUDGET_S."""
        threads = torch.get_num_threads()
        timer = Timer("run()", globals={"run": operation}, num_threads=threads)
        dist.barrier()
        found = (
            timer.timeit(repeats) if repeats else timer.blocked_autorange(min_run_time=BUDGET_S)
        )
        total = torch.tensor(found.median, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / self.world


def measure(ranks: Ranks, sizes: Sizes, tell: Callable[[str], None]) -> Speeds:
    """Measure all quantities. Collective. `tell` gets a line about each."""
    bench = Bench(ranks)
    flops = {}
    for precision in _precisions(ranks.device):
        flops[precision] = _matmul_flops(bench, sizes.matrix, DTYPES[precision])
        tell(f"{precision} matrix products   {flops[precision] / 1e12:8.3g} TFLOP/s")
    memory = _memory_bytes_per_s(bench, sizes.stream_bytes)
    tell(f"memory                 {memory / 1e9:8.3g} GB/s")
    link = None
    if ranks.world > 1:
        link = _all_reduce(bench, sizes.message_bytes)
        tell(f"all-reduce             {link / 1e9:8.3g} GB/s")
    return Speeds(ranks.world, flops, memory, link)


def _precisions(device: torch.device) -> Iterator[str]:
    """Precisions that the device computes in, but fp8, which needs Transformer Engine's
    kernels."""
    yield "fp32"
    if device.type == "cuda":
        yield "fp16"
    if device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        yield "bf16"


def _matmul_flops(bench: Bench, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of the largest product, up to `size`, that stays within the time budget. A
    processor without units for a precision would take minutes."""
    flops, tried = 0.0, size // PARTS
    while tried <= size:
        left, right = (torch.randn(tried, tried, device=bench.device).to(dtype) for _ in "ab")
        seconds = bench.seconds(partial(torch.matmul, left, right))
        flops = 2 * tried**3 / seconds
        if seconds * PARTS**3 > BUDGET_S:
            break
        tried *= PARTS
    return flops


def _memory_bytes_per_s(bench: Bench, nbytes: int) -> float:
    left, right, total = (torch.ones(nbytes // 4, device=bench.device) for _ in range(3))
    return 3 * nbytes / bench.seconds(lambda: torch.add(left, right, out=total))


def _all_reduce(bench: Bench, nbytes: int) -> float:
    """Bytes per second between neighbours. A ring of n ranks moves 2 (n - 1) / n of the data
    (Thakur et al. 2005)."""
    large = torch.zeros(nbytes // 4, device=bench.device)
    seconds = bench.seconds(lambda: dist.all_reduce(large), COLLECTIVES)
    return 2 * (bench.world - 1) / bench.world * nbytes / seconds


def main() -> None:
    """Measure as one rank. Rank 0 reports each quantity and writes the result."""
    try:
        ranks = join()
        sizes = GPU_SIZES if ranks.device.type == "cuda" else CPU_SIZES
        first = ranks.rank == 0
        speeds = measure(ranks, sizes, lambda line: tell(f"  {line}") if first else None)
        if first:
            Path(sys.argv[1]).write_text(json.dumps(asdict(speeds)), encoding="utf-8")
        leave()
    except Exception:  # noqa: BLE001 - the last resort: every failure is reported
        traceback.print_exc()
        end_process(EXIT_FAILED)
    end_process(EXIT_DONE)


if __name__ == "__main__":
    main()
