"""What every rank of test_zero_plus.py does: look at what ZeRO++ gathers, and from whom."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tests.engines.parity_worker import (
    SEED,
    Case,
    first_batch,
    new_engine,
)
from toolkit.engines.distributed import Ranks


class Gathered(TorchDispatchMode):
    """Elements that were gathered, by the number of ranks that they came from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        if func.overloadpacket.__name__ == "_allgather_base_":
            whole, part = args[0].numel(), args[1].numel()
            self.found[whole // part] += whole
        return func(*args, **(kwargs or {}))


def look(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Two steps and one evaluation of a case."""
    engine, layout = new_engine(case, ranks, SEED)
    batches, count = first_batch(ranks, layout)
    # The first step finds a second copy that was made while the model was filled.
    engine.train_step(batches, count, case.learning_rate)
    with Gathered() as in_step:
        engine.train_step(batches, count, case.learning_rate)
    engine.evaluate(batches)
    parameters: list[Any] = list(engine.engine.module.parameters())  # type: ignore[attr-defined]
    copies = [p.ds_secondary_tensor for p in parameters if p.ds_secondary_tensor is not None]
    found = {
        "gathered": dict(in_step.found),
        "micro_batches": len(batches),
        "second": sum(one.numel() for one in copies),
        "whole": sum(p.ds_numel for p in parameters),
    }
    engine.close()
    return found
