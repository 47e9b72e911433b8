"""The learning rate at the boundaries, and against transformers' schedulers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from toolkit.recipe.schema import ScheduleSection
from toolkit.train.schedule import learning_rate

PEAK = 1.0


def rates(total: int, schedule: ScheduleSection) -> list[float]:
    return [learning_rate(step, total, PEAK, schedule) for step in range(total)]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {"name": "linear", "warmup_steps": 4, "min_learning_rate": 0.1},
            [0.25, 0.5, 0.75, 1.0, 0.775, 0.55, 0.325, 0.1],
        ),
        (
            {"name": "cosine", "warmup_steps": 4, "min_learning_rate": 0.1},
            [0.25, 0.5, 0.75, 1.0, 0.8681980515, 0.55, 0.2318019485, 0.1],
        ),
        ({"name": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        (
            {"name": "wsd", "warmup_steps": 2, "decay_steps": 4, "min_learning_rate": 0.2},
            [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2],
        ),
        ({"name": "linear"}, [7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0.0]),
        # A warm-up longer than the run is cut off; a decay waits for the warm-up's end.
        ({"name": "cosine", "warmup_steps": 16}, [n / 16 for n in range(1, 9)]),
        (
            {"name": "wsd", "warmup_steps": 6, "decay_steps": 8},
            [*(n / 6 for n in range(1, 7)), 0.5, 0.0],
        ),
    ],
)
def test_golden(schedule, expected):
    assert rates(8, ScheduleSection(**schedule)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("warmup", [0, 7])
def test_agrees_with_transformers(name, warmup):
    total = 50
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    known_as = {"constant": "constant_with_warmup", "wsd": "warmup_stable_decay"}
    specific = {"num_decay_steps": 10, "decay_type": "linear"} if name == "wsd" else {}
    reference = get_scheduler(
        known_as.get(name, name),
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=specific,
    ).lr_lambdas[0]
    schedule = ScheduleSection(
        name=name, warmup_steps=warmup, decay_steps=10 if name == "wsd" else None
    )
    # DMT's step counts from 0; n steps are done after it.
    assert rates(total, schedule) == pytest.approx(
        [reference(n) for n in range(1, total + 1)], abs=1e-12
    )


@given(
    name=st.sampled_from(["cosine", "linear", "wsd"]),
    total=st.integers(1, 500),
    warmup=st.integers(0, 600),
    decay=st.integers(1, 600),
    lowest=st.floats(0, 1),
)
def test_rises_then_falls_to_the_minimum(name, total, warmup, decay, lowest):
    schedule = ScheduleSection(
        name=name, warmup_steps=warmup, decay_steps=decay, min_learning_rate=lowest
    )
    values = rates(total, schedule)
    top = min(warmup, total)
    assert values[0] > 0 or total == 1 or warmup == 0
    assert values[:top] == sorted(values[:top])
    assert all(a >= b - 1e-12 for a, b in zip(values[top:], values[top + 1 :], strict=False))
    assert max(values) <= PEAK + 1e-12
    if warmup < total:
        assert values[-1] == pytest.approx(lowest)


@pytest.mark.parametrize("step", [-1, 8])
def test_a_step_outside_the_run_is_our_bug(step):
    with pytest.raises(ValueError, match="outside"):
        learning_rate(step, 8, PEAK, ScheduleSection())
