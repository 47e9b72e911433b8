"""The schedule that a plain Trainer gets is the recipe's, one step late."""

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from toolkit.accelerate.trainer import nearest_schedule
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
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    ours = [learning_rate(step, STEPS, PEAK, schedule) for step in range(STEPS)]
    after = schedule.warmup_steps - 1  # wsd's warm-up starts at its smallest rate, not at 0
    assert rates[after:] == pytest.approx(ours[after:], abs=1e-9)
    if name != "wsd":
        assert rates == pytest.approx(ours, abs=1e-9)
