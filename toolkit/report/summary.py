"""What a run has done so far: steps, tokens, loss, starts, checkpoints, and how it ended."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE
from toolkit.report.attempts import Attempt, Event, amount, attempts, number, step_of
from toolkit.report.goodput import Metrics

DATA_BOUND = 0.1
"""From this share of the step time on, a run is bound by its data."""

State = Literal["finished", "stopped", "failed", "open"]


@dataclass(frozen=True)
class Ending:
    """How the last start ended. `open`: no end was recorded, so it runs or was killed."""

    state: State
    exit_code: int | None = None
    why: str = ""
    """The signal that stopped it, or the first error, with its rank."""


@dataclass(frozen=True)
class Loss:
    """Training loss at one step."""

    step: int
    value: float


@dataclass(frozen=True)
class Saves:
    """Checkpoints that were written."""

    count: int
    last_step: int | None
    stall_s: float | None
    """Mean stall of training; None where runs did not record it."""
    commit_s: float | None
    """Mean time until one was committed."""


@dataclass(frozen=True)
class Summary:
    """One run directory."""

    steps: int
    tokens: int | None
    """Unmasked tokens consumed up to the last logged step; None where that was not counted."""
    losses: tuple[Loss, Loss] | None
    """First and last that are logged."""
    validation: Loss | None
    """The last one."""
    starts: int
    restarts: tuple[str, ...]
    """Why the launcher restarted the workers, each time that they had failed."""
    restarts_after_stop: int
    """Restarts by another tool's launcher, which takes exit code 75 for a failure."""
    saves: Saves
    data_wait_share: float | None
    """Share of the time of all logged steps that rank 0 waited for micro batches, 0 … 1; None
    where no line says so."""
    prediction: Mapping[str, Any] | None
    """The last `prediction` event."""
    ending: Ending


def summarize(events: Sequence[Event], metrics: Sequence[Metrics]) -> Summary:
    """Read a run's events and metrics; what is missing is left out."""
    found = attempts(events)
    losses = [loss for line in metrics if (loss := _loss(line)) is not None]
    validations = [loss for event in _all(found, "evaluation") if (loss := _loss(event))]
    automatic = [(before, one) for before, one in pairwise(found) if one.automatic]
    restarts = [one.events[0].get("reason") for before, one in automatic if not before.stopped]
    predictions = _all(found, "prediction")
    last = metrics[-1] if metrics else {}
    tokens = amount(last, "consumed_tokens")
    return Summary(
        steps=max([step_of(last) or 0, *(one.step for one in found[-1:])]),
        tokens=None if tokens is None else int(tokens),
        losses=(losses[0], losses[-1]) if losses else None,
        validation=validations[-1] if validations else None,
        starts=len(found),
        restarts=tuple(str(reason or "no reason recorded") for reason in restarts),
        restarts_after_stop=len(automatic) - len(restarts),
        saves=_saves(_all(found, "save")),
        data_wait_share=_data_wait_share(metrics),
        prediction=predictions[-1] if predictions else None,
        ending=_ending(found[-1]) if found else Ending("open"),
    )


def _all(found: Sequence[Attempt], kind: str) -> list[Event]:
    return [event for one in found for event in one.of(kind)]


def _loss(record: Mapping[str, Any]) -> Loss | None:
    step, value = step_of(record), number(record, "loss")
    return None if step is None or value is None else Loss(step, value)


def _saves(events: Sequence[Event]) -> Saves:
    steps = [step for event in events if (step := step_of(event)) is not None]
    return Saves(
        len(events),
        max(steps, default=None),
        _mean([amount(event, "stall_s") for event in events]),
        _mean([amount(event, "seconds") for event in events]),
    )


def _data_wait_share(metrics: Sequence[Metrics]) -> float | None:
    waited_s, trained_s, before = 0.0, 0.0, 0.0
    for line in metrics:
        step, each, waited = (
            amount(line, name) for name in ("step", "step_time_s", "data_wait_s")
        )
        if step is not None and each is not None and waited is not None:
            waited_s += (step - before) * waited
            trained_s += (step - before) * each
            before = step
    return waited_s / trained_s if trained_s > 0 else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _ending(last: Attempt) -> Ending:
    ends = [(int(amount(event, "exit_code") or 0), event) for event in last.of("end")]
    reported = [*last.of("failure")]
    for code, event in ends:
        if not reported and code not in (EXIT_DONE, EXIT_RESUMABLE):
            error = event.get("error", "no message recorded")
            return Ending("failed", code, f"rank {event.get('rank', 0)}: {error}")
    for event in reported[-1:]:
        code = int(amount(event, "exit_code") or EXIT_FAILED)
        return Ending("failed", code, str(event.get("reason")))
    if any(code == EXIT_RESUMABLE for code, _ in ends):
        signals = dict.fromkeys(str(event.get("signal")) for event in last.of("signal"))
        return Ending("stopped", EXIT_RESUMABLE, ", ".join(signals))
    return Ending("finished", EXIT_DONE) if ends else Ending("open")
