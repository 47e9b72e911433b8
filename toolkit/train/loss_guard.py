"""Decides which steps are skipped because of their loss, and when a run with too many of them
stops."""

import math
import statistics
from collections.abc import Sequence

from toolkit.engines.base import StepResult
from toolkit.errors import RunFailed
from toolkit.recipe.schema import GuardSection
from toolkit.train.all_ranks import on_every_rank

HISTORY_STEPS = 50
"""Number of recent losses that a new loss is compared with."""
ENOUGH_STEPS = 10
"""Minimum number of losses: with fewer, the median is unreliable, and the loss falls fast at
the start of a run."""
MOST_SKIPS = 20
"""Skipped steps in a row that end a run."""


class StepGuard:
    """Checks the steps of one run, identically on every rank."""

    def __init__(self, section: GuardSection) -> None:
        self.section = section
        self._skips: list[str] = []
        """Why each of the last steps was skipped. Empty after one that was not."""

    def max_loss(self, recent_losses: Sequence[float]) -> float:
        """Loss (nats) above which a step is a spike, after steps of `recent_losses`.

        A median of 0 gives no limit: a hinge loss is 0 if all pairs keep their margin.
        """
        factor = self.section.spike_factor
        if factor is None or len(recent_losses) < ENOUGH_STEPS:
            return math.inf
        median = statistics.median(recent_losses)
        return factor * median if median > 0 else math.inf

    def check(self, step: int, result: StepResult) -> None:
        """Count skipped steps. Raises RunFailed after `MOST_SKIPS` in a row."""
        if result.skipped is None:
            self._skips.clear()
            return
        self._skips.append(result.skipped)
        if len(self._skips) < MOST_SKIPS:
            return
        first = step - len(self._skips) + 1
        reasons = "; ".join(dict.fromkeys(self._skips))
        raise on_every_rank(
            RunFailed(
                f"steps {first} to {step} were all skipped: {reasons}. The weights are those "
                f"of step {first - 1}",
                fix="look at the data of these steps, and at loss and grad_norm before them in "
                "metrics.jsonl. In a new run: a lower optimizer.learning_rate, a longer "
                "schedule.warmup_steps, or training.precision bf16 or fp32. A higher "
                "guard.spike_factor skips fewer",
                retry=False,  # A restart would see the same batches.
            )
        )
