"""Train a small model of every type with its rows spread over two ranks.

    python -m tests.models.every_context [TYPE …]

Two steps of `ddp` with context 2 against a plain loop. Those that agree are in `SPLIT_IS_KEPT`
of toolkit/plan/rules/context.py.
"""

import gc
import sys
from collections.abc import Sequence
from unittest.mock import patch

from tests import processes
from tests.engines.parity_worker import Case, plain_loop, reference_model, train
from tests.forked import call_ranks
from tests.models.every_type import tiny
from toolkit.engines.distributed import Ranks
from toolkit.errors import PlanError, RecipeError
from toolkit.models.judge import model_types
from toolkit.plan.rules import context

STEPS = 2


def each(ranks: Ranks, types: Sequence[str]) -> list[str]:
    """Of one type after the other, the largest relative difference, or why there is none."""
    found = []
    with patch.object(context, "SPLIT_IS_KEPT", types):
        for model_type in types:
            try:
                found.append(tried(ranks, model_type))
            except (PlanError, RecipeError) as error:
                found.append(f"refused: {error}")
            except Exception as error:  # noqa: BLE001 - it is printed
                found.append(f"{type(error).__name__}: {error}")
            gc.collect()
    return found


def tried(ranks: Ranks, model_type: str) -> str:
    config = tiny(model_type)
    case = Case("ddp", 4, steps=STEPS, family=config, parallel={"context": 2})
    found = train(case, ranks)
    expected = plain_loop(*reference_model(Case("ddp", 8, family=config)), steps=STEPS)
    differences = (
        abs(got - want) / abs(want)
        for what in ("loss", "grad_norm")
        for got, want in zip(found[what], expected[what], strict=True)
    )
    return f"{max(differences):.0e}"


def main(types: list[str]) -> int:
    processes.HANG_S = 120.0
    for model_type in types or sorted(model_types):
        try:
            (found,) = call_ranks(each, 2, [model_type])[0]
        except AssertionError as error:
            found = str(error).strip().splitlines()[-1]
        print(model_type, " ".join(found.split())[:200], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
