"""Common parts of the ranks that measure a machine."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from toolkit.engines.distributed import Ranks, end_process, join, leave
from toolkit.errors import EXIT_DONE, EXIT_FAILED
from toolkit.text.terminal import tell

REPEATS = range(3, 101)
"""How often an operation is repeated at least and at most."""


class Bench:
    """Times operations on all ranks at once."""

    def __init__(self, ranks: Ranks, budget_s: float) -> None:
        """`budget_s`: how long one quantity is measured."""
        self.device = ranks.device
        self.world = ranks.world
        self._budget_s = budget_s

    def seconds(self, operation: Callable[[], object]) -> float:
        """Median of several runs after a first one, averaged over the ranks."""
        once = self._time(operation)
        slowest = self._combined(min(once, self._time(operation)), dist.ReduceOp.MAX)
        repeats = int(self._budget_s / slowest)
        repeats = max(REPEATS.start, min(repeats, REPEATS.stop - 1))
        found = median(self._time(operation) for _ in range(repeats))
        return self._combined(found, dist.ReduceOp.SUM) / self.world

    def _time(self, operation: Callable[[], object]) -> float:
        dist.barrier()
        started = time.perf_counter()
        operation()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - started

    def _combined(self, value: float, how: dist.ReduceOp.RedOpType) -> float:
        """The same number on every rank."""
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=how)
        return float(tensor)


Tell = Callable[[str], None]
"""Takes a line about what was measured."""


def main(measure: Callable[[Ranks, Tell], Any]) -> None:
    """The main program of a rank, `python -m MODULE RESULT.json`: measure, and let rank 0 write
    the dataclass that `measure` returns as JSON."""
    try:
        ranks = join()
        result = measure(ranks, tell_on(ranks))
        if ranks.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(asdict(result)), encoding="utf-8")
        leave()
    except Exception:  # noqa: BLE001 - the last resort: every failure is reported
        traceback.print_exc()
        end_process(EXIT_FAILED)
    end_process(EXIT_DONE)


def tell_on(ranks: Ranks) -> Tell:
    """How ranks report progress: rank 0 does, on standard error."""
    return (lambda line: tell(f"  {line}")) if ranks.rank == 0 else lambda _: None
