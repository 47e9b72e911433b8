"""What every rank of test_bf16_states.py does: train, and look at what the optimizer keeps."""

from typing import Any

from tests.engines.parity_worker import SEED, Case, new_engine, steps, train
from toolkit.engines.distributed import Ranks


def states(case: Case, ranks: Ranks) -> dict[str, Any]:
    """Curves of a case, and the dtypes of its optimizer's states after a step."""
    engine, layout = new_engine(case, ranks, SEED)
    steps(engine, layout, ranks, 0, 1)
    adam: Any = engine.optimizer.optimizer  # type: ignore[attr-defined]
    dtypes = {weight.dtype for weight in adam.state}
    for state in adam.state.values():
        dtypes |= {state["exp_avg"].dtype, state["exp_avg_sq"].dtype}
    engine.close()
    return {"dtypes": {*map(str, dtypes)}, **train(case, ranks)}
