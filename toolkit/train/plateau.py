"""`schedule.name: plateau`: torch's ReduceLROnPlateau, whose state is in every checkpoint."""

import math
from dataclasses import replace

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from toolkit.checkpoint.validation import PlateauState
from toolkit.recipe.schema import PlateauSection, ScheduleSection


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
