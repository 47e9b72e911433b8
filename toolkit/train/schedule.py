"""Learning rate of each optimizer step: a pure function of the step's number and, with
`plateau`, of the validation losses before."""

import math
from dataclasses import replace

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from toolkit.checkpoint.validation import PlateauState
from toolkit.recipe.schema import PlateauSection, ScheduleSection


def learning_rate(
    step: int,
    total_steps: int,
    peak: float,
    schedule: ScheduleSection,
    plateau: PlateauState | None = None,
) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    Every step has a positive rate. Warm-up is peak · (step + 1) / warm-up steps, so step 0
    already moves the weights and the warm-up's last step runs at the peak. Without a warm-up,
    step 0 does. From that step on the rate decays so that step `total_steps`, the first one
    after the run, would run at `min_learning_rate`: the last step still trains if that is 0.
    Megatron-LM's scheduler decays in the same way, and so does transformers' without a warm-up.

    `constant` stays at the peak, and so does `plateau` until a validation has reduced its rate
    to that of the state `plateau`. `wsd` (warm-up, stable, decay; arXiv:2404.06395)
    stays at the peak up to step `total_steps - decay_steps` and then falls as its `decay`
    says. A warm-up as long as the run or longer is cut off at the end of the run, and a
    `wsd` decay never starts before the warm-up is over.
    """
    warmup = schedule.warmup(total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.name == "plateau" and plateau is not None and plateau.peak == peak:
        return plateau.learning_rate
    if schedule.name in ("constant", "plateau"):
        return peak

    start = max(warmup - 1, 0)
    if schedule.name == "wsd":
        assert schedule.decay_steps is not None, "checked at load"
        start = max(start, total_steps - schedule.decay_steps)
    progress = max(0, step - start) / (total_steps - start)
    shape = schedule.decay if schedule.name == "wsd" else schedule.name
    share = _DECAYS[shape](progress)
    return schedule.min_learning_rate + share * (peak - schedule.min_learning_rate)


def _linear(progress: float) -> float:
    return 1.0 - progress


def _minus_sqrt(progress: float) -> float:
    """1 - √progress. arXiv:2405.18392."""
    return 1.0 - math.sqrt(progress)


def _cosine(progress: float) -> float:
    """Half a cosine wave from 1 (progress 0) to 0 (progress 1). arXiv:1608.03983."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


_DECAYS = {"linear": _linear, "cosine": _cosine, "1-sqrt": _minus_sqrt}
"""Share of the way between the smallest and the peak rate, after a share of the decay."""


def after_validation(
    state: PlateauState | None, loss: float, peak: float, schedule: ScheduleSection
) -> PlateauState:
    """The state after a validation with this `loss`.

    Its settings are those of the recipe, the counts those of `state`. A run that continues
    with another peak starts again from that rate.
    """
    if state is None or state.peak != peak:
        state = PlateauState(peak, peak)
    section = schedule.plateau or PlateauSection()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=state.learning_rate)
    scheduler = ReduceLROnPlateau(
        optimizer,
        factor=section.factor,
        patience=section.patience,
        min_lr=schedule.min_learning_rate,
    )
    scheduler.best = math.inf if state.best is None else state.best
    scheduler.num_bad_epochs = state.num_bad_epochs
    scheduler.step(loss)
    return replace(
        state,
        learning_rate=float(optimizer.param_groups[0]["lr"]),
        best=scheduler.best if math.isfinite(scheduler.best) else None,
        num_bad_epochs=scheduler.num_bad_epochs,
    )
