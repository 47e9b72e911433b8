"""The learning rate at the boundaries, and against transformers' schedulers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import (
    EarlyStoppingCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)

from toolkit.checkpoint.validation import ValidationHistory
from toolkit.recipe.schema import PlateauSection, ScheduleSection
from toolkit.train.schedule import after_validation, learning_rate

PEAK = 1.0


def rates(total: int, schedule: ScheduleSection) -> list[float]:
    return [learning_rate(step, total, PEAK, schedule) for step in range(total)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {"name": "linear", "warmup_steps": 4, "min_learning_rate": 0.1},
            [0.25, 0.5, 0.75, 1.0, 0.82, 0.64, 0.46, 0.28],
        ),
        ({"name": "constant", "warmup_ratio": 0.4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (
            {"name": "wsd", "warmup_steps": 2, "decay_steps": 4, "min_learning_rate": 0.2},
            [0.5, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4],
        ),
        ({"name": "linear"}, [n / 8 for n in range(8, 0, -1)]),
        # A warm-up longer than the run is cut off; a decay waits for the warm-up's end.
        ({"name": "cosine", "warmup_steps": 16}, [n / 16 for n in range(1, 9)]),
        (
            {"name": "wsd", "warmup_steps": 6, "decay_steps": 8},
            [*(n / 6 for n in range(1, 7)), 2 / 3, 1 / 3],
        ),
    ],
)
def test_golden(schedule, expected):
    assert rates(8, ScheduleSection(**schedule)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("name", "decay"),
    [
        ("cosine", "linear"),
        ("linear", "linear"),
        ("constant", "linear"),
        ("wsd", "linear"),
        ("wsd", "cosine"),
        ("wsd", "1-sqrt"),
    ],
)
def test_agrees_with_transformers(name, decay, warmup):
    """At every step; with a warm-up, whose first rate is 0 there, one step later."""
    total = 50
    later = int(warmup > 0)
    shift = later if name != "wsd" else 0  # its decay has its own length
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    known_as = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}
    specific = {"num_decay_steps": 10, "decay_type": decay} if name == "wsd" else {}
    reference = get_scheduler(
        known_as.get(name, name),
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total + shift,
        scheduler_specific_kwargs=specific,
    ).lr_lambdas[0]
    schedule = ScheduleSection(
        name=name,
        warmup_steps=warmup,
        decay_steps=10 if name == "wsd" else None,
        decay=decay,
    )
    theirs = [reference(step + shift) for step in range(warmup, total)]
    assert rates(total, schedule)[warmup:] == pytest.approx(theirs, abs=1e-12)
    warm = [reference(step + later) for step in range(warmup)]
    assert rates(total, schedule)[:warmup] == pytest.approx(warm, abs=1e-12)


LOSSES = st.lists(st.floats(1, 2) | st.sampled_from([math.nan, math.inf]), max_size=30)


@given(LOSSES, st.integers(0, 3), st.sampled_from([0.0, 0.05]))
def test_a_plateau_is_that_of_torch(losses, patience, lowest):
    """From its state alone, which is all that a checkpoint has."""
    settings = {"factor": 0.3, "patience": patience}
    schedule = ScheduleSection(
        name="plateau",
        warmup_steps=2,
        min_learning_rate=lowest,
        plateau=PlateauSection(**settings),
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=PEAK)
    scheduler = ReduceLROnPlateau(optimizer, min_lr=lowest, **settings)
    state = None
    for loss in losses:
        state = after_validation(state, loss, PEAK, schedule)
        scheduler.step(loss)
        rate = learning_rate(2, 8, PEAK, schedule, state)
        assert rate == optimizer.param_groups[0]["lr"]
    assert [learning_rate(step, 8, PEAK, schedule, state) for step in (0, 1)] == [0.5, 1.0]
    assert learning_rate(2, 8, 3.0, schedule, state) == 3.0, "another peak begins there"


@given(LOSSES, st.integers(1, 4))
def test_a_run_ends_where_the_trainer_ends_it(losses, patience):
    """Transformers' callback, and its rule for the best metric."""
    theirs = EarlyStoppingCallback(patience)
    arguments = TrainingArguments(
        "unused", metric_for_best_model="loss", greater_is_better=False, use_cpu=True
    )
    state, history = TrainerState(), ValidationHistory()
    for step, loss in enumerate(filter(math.isfinite, losses), start=1):
        control = TrainerControl()
        theirs.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if state.best_metric is None or loss < state.best_metric:
            state.best_metric, state.best_global_step = loss, step
        history = history.after(step, loss)
        assert history.ends_run(patience) == control.should_training_stop
        assert (history.best_loss, history.best_step) == (
            state.best_metric,
            state.best_global_step,
        )
    assert not history.ends_run(None)
