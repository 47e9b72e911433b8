"""One small run: a real engine on the batches of a rehearsal, step by step.

Rehearsals, the self-test and the engines' tests all train by this function, and compare with
`toolkit.rehearse.reference`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from toolkit.adapters.weights import first_weights
from toolkit.batch import MicroBatch
from toolkit.engines.base import StepResult
from toolkit.engines.build import build_engine
from toolkit.engines.distributed import Ranks
from toolkit.engines.setup import EngineSetup
from toolkit.models import huggingface as hf
from toolkit.objectives.dpo import REFERENCE
from toolkit.rehearse.batches import global_batches, micro_batches
from toolkit.run.assignment import Assignment


def small_run(
    case: Assignment, ranks: Ranks, batches: Sequence[MicroBatch] | None = None
) -> Iterator[StepResult]:
    """Build the engine of `case` as `dmt train` does, and yield the result of each step.

    Collective. `batches` are the global ones, one per step: by default, those that the seed
    of the recipe gives.
    """
    recipe, layout = case.recipe, case.plan.layout
    config = hf.build_config(recipe.model)
    weights = first_weights(recipe, config)
    setup = EngineSetup.of(recipe, case.plan, case.engine_config, ranks, config, weights)
    engine = build_engine(case.plan.engine, setup)
    batches = batches or global_batches(recipe, config.vocab_size)
    rank, rows = layout.data_rank(ranks.rank), recipe.training.rows_per_sample
    shares = [micro_batches(batch, layout, rank, rows) for batch in batches]
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
