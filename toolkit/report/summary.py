"""What a run has done so far: steps, tokens, loss, starts, checkpoints, and how it ended."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE
from toolkit.report.attempts import Attempt, Event, attempts, number, step_of
from toolkit.report.goodput import Metrics
from toolkit.run.comparison import differences

DATA_BOUND = 0.1
"""If data waits take at least this share of the step time, data limits the run."""

RunState = Literal["running", "stopped", "failed", "done"]


@dataclass(frozen=True)
class Ending:
    """How the last start ended. `running` where no end is recorded."""

    state: RunState
    exit_code: int | None = None
    why: str = ""
    """The signal that stopped it, or the first error, with its rank."""

    def __str__(self) -> str:
        if self.state == "done":
            return "finished (exit code 0)"
        if self.state == "stopped":
            why = f" by {self.why}" if self.why else ""
            return f"stopped{why} after saving (exit code {self.exit_code}); can be resumed"
        if self.exit_code is not None:
            return f"failed (exit code {self.exit_code}): {self.why}"
        return self.why or "not yet: it is running"


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
    """Mean stall of training. None without a checkpoint."""
    commit_s: float | None
    """Mean time until one was committed."""

    def __str__(self) -> str:
        if not self.count:
            return "none written"
        said = f"{self.count:,} written, the last at step {self.last_step or 0:,}"
        if self.stall_s is not None:
            said += f"; training stood still for {self.stall_s:.2f} s each"
        if self.commit_s is not None:
            said += f"; {self.commit_s:.2f} s until committed"
        return said


@dataclass(frozen=True)
class Summary:
    """One run directory."""

    steps: int
    tokens: int | None
    """Unmasked tokens consumed up to the last logged step. None before one is logged."""
    losses: tuple[Loss, Loss] | None
    """The first and the last logged loss."""
    validation: Loss | None
    """The last validation."""
    starts: int
    restarts: tuple[str, ...]
    """Why the launcher restarted the workers, each time that it did."""
    saves: Saves
    data_wait_share: float | None
    """Share of the time of all logged steps that rank 0 waited for micro batches, 0 … 1. None
    before a step is logged."""
    prediction: Mapping[str, Any] | None
    """The last `prediction` event."""
    ending: Ending

    def rows(self) -> Iterator[tuple[str, str]]:
        """Pairs of a label, empty where it continues, and what there is to say."""
        yield "ended", str(self.ending)
        tokens = self.tokens
        trained = f", {tokens:,} trained tokens up to the last logged one" if tokens else ""
        yield "steps", f"{self.steps:,} done{trained}"
        if self.losses is not None:
            first, last = self.losses
            path = (
                f"{first.value:.4f} at step {first.step:,} → {last.value:.4f} at {last.step:,}"
            )
            yield "loss", path
        if (found := self.validation) is not None:
            yield "validation", f"{found.value:.4f} at step {found.step:,}"
        yield "starts", f"{self.starts:,}, {len(self.restarts):,} of them by the launcher"
        for reason in self.restarts:
            yield "", f"- {reason}"
        yield "checkpoints", str(self.saves)
        if (share := self.data_wait_share) is not None and share >= DATA_BOUND:
            waited = f"{share:.0%} of the step time was spent waiting for batches"
            yield (
                "data",
                f"{waited}: the run is bound by its data (is DMT_CACHE on a local disk?)",
            )
        if self.prediction is not None:
            yield from differences(self.prediction)


def summarize(events: Sequence[Event], metrics: Sequence[Metrics]) -> Summary:
    """Read a run's events and metrics."""
    found = attempts(events)
    losses = [loss for line in metrics if (loss := _loss(line)) is not None]
    validations = [loss for one in _all(events, "evaluation") if (loss := _loss(one))]
    restarts = [str(one.events[0]["reason"]) for one in found if one.automatic]
    predictions = _all(events, "prediction")
    last = metrics[-1] if metrics else {}
    return Summary(
        steps=max([step_of(last) or 0, *(one.step for one in found[-1:])]),
        tokens=last.get("consumed_tokens"),
        losses=(losses[0], losses[-1]) if losses else None,
        validation=validations[-1] if validations else None,
        starts=len(found),
        restarts=tuple(restarts),
        saves=_saves(_all(events, "save")),
        data_wait_share=_data_wait_share(metrics),
        prediction=predictions[-1] if predictions else None,
        ending=_ending(found[-1]) if found else Ending("running"),
    )


def _all(events: Sequence[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def _loss(record: Mapping[str, Any]) -> Loss | None:
    step, value = step_of(record), number(record, "loss")
    return None if step is None or value is None else Loss(step, value)


def _saves(events: Sequence[Event]) -> Saves:
    steps = [step for event in events if (step := step_of(event)) is not None]
    means = []
    for name in ("stall_s", "seconds"):
        known = [each for event in events if (each := number(event, name)) is not None]
        means.append(fmean(known) if known else None)
    return Saves(len(events), max(steps, default=None), *means)


def _data_wait_share(metrics: Sequence[Metrics]) -> float | None:
    waited_s, trained_s, before = 0.0, 0.0, 0.0
    for line in metrics:
        step, each, waited = (
            number(line, name) for name in ("step", "step_time_s", "data_wait_s")
        )
        if step is not None and each is not None and waited is not None:
            waited_s += (step - before) * waited
            trained_s += (step - before) * each
            before = step
    return waited_s / trained_s if trained_s > 0 else None


def _ending(last: Attempt) -> Ending:
    ends = [(event["exit_code"], event) for event in last.of("end")]
    for event in last.of("failure")[-1:]:
        return Ending("failed", event["exit_code"], str(event["reason"]))
    for code, event in ends:
        if code not in (EXIT_DONE, EXIT_RESUMABLE):
            error = event.get("error", "no message recorded")
            return Ending("failed", code, f"rank {event.get('rank', 0)}: {error}")
    if any(code == EXIT_RESUMABLE for code, _ in ends):
        signals = dict.fromkeys(str(event.get("signal")) for event in last.of("signal"))
        return Ending("stopped", EXIT_RESUMABLE, ", ".join(signals))
    return Ending("done", EXIT_DONE) if ends else Ending("running")
