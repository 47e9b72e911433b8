"""One rank of one rehearsed layout.

    python -m toolkit.rehearse.worker RUN_DIR

The real engine, built from the run directory as `dmt train` builds it, on the batches of
the rehearsal instead of the recipe's data.
"""

import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from toolkit.adapters.weights import first_weights
from toolkit.batch import MicroBatch
from toolkit.engines.base import Engine
from toolkit.engines.distributed import Ranks, end_process, join, leave
from toolkit.engines.setup import EngineSetup, build_engine
from toolkit.errors import EXIT_DONE, EXIT_FAILED
from toolkit.models import huggingface as hf
from toolkit.objectives.dpo import REFERENCE
from toolkit.rehearse.batches import document_starts, global_batch, isolated, micro_batches
from toolkit.rehearse.record import write_step
from toolkit.run.assignment import Assignment, read_assignment
from toolkit.terminal import tell


def train(assignment: Assignment, ranks: Ranks) -> None:
    """Train one layout; rank 0 records each step in the run directory."""
    recipe, layout = assignment.recipe, assignment.plan.layout
    config = hf.build_config(recipe.model)
    weights = first_weights(recipe, config)
    setup = EngineSetup.of(
        recipe, assignment.plan, assignment.engine_config, ranks, config, weights
    )
    engine = build_engine(assignment.plan.engine, setup)
    steps = recipe.training.steps
    assert steps is not None, "a rehearsal's length is stated in steps"
    objective = recipe.objective()
    wholes = [
        MicroBatch(*global_batch(recipe.training, config.vocab_size, step))
        for step in range(steps)
    ]
    if recipe.data.isolates:
        wholes = [
            isolated(whole, document_starts(recipe.training, step))
            for step, whole in enumerate(wholes)
        ]
    place = layout, layout.data_rank(ranks.rank), recipe.training.rows_per_sample
    shares = [micro_batches(whole, *place) for whole in wholes]
    if REFERENCE in objective.reads:
        shares = [_with_reference(engine, share) for share in shares]
    for whole, mine in zip(wholes, shares, strict=True):
        count = float(objective.count(whole))
        result = engine.train_step(mine, count, recipe.optimizer.learning_rate)
        if ranks.rank == 0:
            write_step(assignment.run_dir, result.loss, result.grad_norm)
    engine.close()


def _with_reference(engine: Engine, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro batches with the reference's log-probabilities, under the initial weights."""
    values = engine.sequence_log_probs(micro_batches).chunk(len(micro_batches))
    pairs = zip(micro_batches, values, strict=True)
    return [replace(batch, extra={REFERENCE: value}) for batch, value in pairs]


def main(train: Callable[[Assignment, Ranks], None] = train) -> None:
    """Run one rank; a failure's last line on standard error says what it was."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        ranks = join()
        train(read_assignment(Path(sys.argv[1]), ranks.world), ranks)
        leave()
    except Exception as error:  # noqa: BLE001 - the last resort: every failure is reported
        traceback.print_exc()
        first, _, more = str(error).strip().partition("\n")
        if more:
            tell(f"{type(error).__name__}: {first}")
        end_process(EXIT_FAILED)
    end_process(EXIT_DONE)


if __name__ == "__main__":
    main()
