"""Learning rate of each optimizer step: a pure function of the step's number."""

import math

from toolkit.recipe.schema import ScheduleSection


def learning_rate(step: int, total_steps: int, peak: float, schedule: ScheduleSection) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Let n = step + 1, the number of steps done once this one is. Warm-up is
    peak · n / warmup_steps, so the first step already moves the weights and step
    `warmup_steps - 1` runs at the peak. The decay is a function of n too and is
    complete at n = total_steps: the last step runs at `min_learning_rate`.
    transformers' schedulers agree when they are asked for step n.

    `constant` stays at the peak. `wsd` (warm-up, stable, decay; arXiv:2404.06395)
    stays at the peak until the last `decay_steps` steps. A warm-up as long as the run
    or longer is cut off at the end of the run, and a `wsd` decay never starts before
    the warm-up is over.

    Raises ValueError when `step` is outside 0 … total_steps - 1, or `wsd` has no
    `decay_steps` (the recipe's checks refuse that earlier).
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step {step} is outside 0 … {total_steps - 1}")
    done = step + 1
    if done <= schedule.warmup_steps:
        return peak * done / schedule.warmup_steps
    if schedule.name == "constant":
        return peak

    start = schedule.warmup_steps
    if schedule.name == "wsd":
        if schedule.decay_steps is None:
            raise ValueError("the wsd schedule needs decay_steps")
        start = max(start, total_steps - schedule.decay_steps)
    progress = max(0, done - start) / (total_steps - start)
    return schedule.min_learning_rate + (peak - schedule.min_learning_rate) * (
        _cosine(progress) if schedule.name == "cosine" else 1.0 - progress
    )


def _cosine(progress: float) -> float:
    """Half a cosine wave from 1 (progress 0) to 0 (progress 1); arXiv:1608.03983."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))
