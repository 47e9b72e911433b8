"""One rank of one rehearsed layout: the run directory's engine, on a rehearsal's batches.

python -m toolkit.rehearse.worker RUN_DIR
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from toolkit.batch import MicroBatch
from toolkit.engines.base import StepResult
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks, end_process, join, leave
from toolkit.engines.setup import EngineSetup
from toolkit.errors import EXIT_DONE, EXIT_FAILED
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.models.adapters.weights import first_weights
from toolkit.objectives.preference import REFERENCE
from toolkit.rehearse.batches import global_batches, micro_batches
from toolkit.rehearse.comparison import write_step
from toolkit.run.assignment import Assignment, read_assignment
from toolkit.text.terminal import tell


def small_run(
    case: Assignment,
    ranks: Ranks,
    batches: Sequence[MicroBatch] | None = None,
    split: Layout | None = None,
) -> Iterator[StepResult]:
    """Build the engine of `case` as a rank does, and yield the result of each step.

    Collective. `batches` are the global ones, one per step: by default, those that the seed
    of the recipe gives. `split`: how they are split over ranks, where samples moved.
    """
    recipe, layout = case.recipe, case.plan.layout
    config = hf.build_config(recipe.model)
    weights = first_weights(recipe, config)
    setup = EngineSetup.of(recipe, case.plan, case.engine_config, ranks, config, weights)
    engine = build_engine(case.plan.engine, setup)
    batches = batches or global_batches(recipe, config.vocab_size)
    rank, rows = layout.data_rank(ranks.rank), recipe.training.rows_per_sample
    shares = [micro_batches(batch, split or layout, rank, rows) for batch in batches]
    objective = recipe.objective()
    if REFERENCE in objective.reads:
        for share in shares:  # the reference's log-probabilities, under the initial weights
            values = engine.sequence_log_probs(share).chunk(len(share))
            pairs = zip(share, values, strict=True)
            share[:] = [replace(batch, extra={REFERENCE: value}) for batch, value in pairs]
    for batch, share in zip(batches, shares, strict=True):
        count = float(objective.count(batch))
        yield engine.train_step(share, count, recipe.optimizer.learning_rate)
    engine.close()


def train(assignment: Assignment, ranks: Ranks) -> None:
    """Train one layout. Rank 0 records each step in the run directory."""
    for result in small_run(assignment, ranks):
        if ranks.rank == 0:
            write_step(assignment.run_dir, result.loss, result.grad_norm)


def main(train: Callable[[Assignment, Ranks], None] = train) -> None:
    """Run one rank. A failure's last line on standard error says what it was."""
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
