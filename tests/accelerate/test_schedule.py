"""The schedule that a plain Trainer gets is the recipe's, less than one step late."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from toolkit.accelerate.scripts import nearest_schedule
from toolkit.recipe.schema import ScheduleSection
from toolkit.train.schedule import learning_rate

PEAK, STEPS = 1e-2, 20


@pytest.mark.parametrize("smallest", [0.0, 1e-3])
@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_trainers_nearest_schedule(name: Any, smallest: float) -> None:
    decay = 5 if name == "wsd" else None
    schedule = ScheduleSection(
        name=name, warmup_steps=4, decay_steps=decay, min_learning_rate=smallest
    )
    said = nearest_schedule(schedule, PEAK)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(
        said["lr_scheduler_type"],
        optimizer,
        num_warmup_steps=said["warmup_steps"],
        num_training_steps=STEPS,
        scheduler_specific_kwargs=said["lr_scheduler_kwargs"],
    )
    rates = []
    for _ in range(STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    ours = [learning_rate(step, STEPS, PEAK, schedule) for step in range(STEPS)]
    # wsd's warm-up starts at its smallest rate, not at 0.
    first = schedule.warmup_steps if name == "wsd" else 1
    for step in range(first, STEPS):
        around = ours[step - 1 : step + 1]
        assert min(around) - 1e-9 <= rates[step] <= max(around) + 1e-9, step
