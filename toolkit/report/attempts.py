"""The starts of a run: its events, cut where `dmt launch` or a restart began again."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from toolkit.errors import EXIT_DONE, EXIT_RESUMABLE

Event = Mapping[str, Any]
_MOST = 1e15
"""Larger numbers of steps or seconds are damage. Floats count exactly up to there."""


@dataclass
class Attempt:
    """One start of the workers, until they ended. Times are seconds since the epoch."""

    events: list[Event] = field(default_factory=list)
    automatic: bool = False
    """Started again by the launcher, not by a person."""
    noticed: float | None = None
    """When the launcher restarted what came to its end here."""

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def started(self) -> float | None:
        """When its training loop began. None when it never did."""
        return next((time_of(event) for event in self.of("start")), None)

    @property
    def began(self) -> float:
        """When its processes were asked for. Under another launcher, when they began to run."""
        first = self.events[0]
        for event in self.of("start") if not begins(first) else ():
            return time_of(event) - (amount(event, "seconds") or 0.0)
        return time_of(first)

    @property
    def load_s(self) -> float:
        """Seconds for loading checkpoints."""
        return seconds_of(self.of("load"))

    @property
    def replay_s(self) -> float:
        """Seconds for steps done again that were done before a kill."""
        return seconds_of(self.of("replay"))

    @property
    def stopped(self) -> bool:
        """Whether it saved and left after a signal, without a failure."""
        codes = {number(event, "exit_code") for event in self.of("end")}
        return EXIT_RESUMABLE in codes and codes <= {EXIT_DONE, EXIT_RESUMABLE}

    @property
    def hung(self) -> float | None:
        """When it came to a halt. None if nothing hung. The event is written `idle_s` later,
        when the halt is found."""
        for event in self.of("hang"):
            return time_of(event) - (amount(event, "idle_s") or 0.0)
        return None

    @property
    def last_event(self) -> float:
        """The last time that it is known to have been alive."""
        return max(time_of(event) for event in self.events)

    @property
    def step(self) -> int:
        """Optimizer steps that are known to have been done at its end."""
        return max((step_of(event) or 0 for event in self.events), default=0)


def attempts(events: Sequence[Event]) -> list[Attempt]:
    """The starts of a run, in the order of the file. Events without a time are left out.

    A start begins with `launch`, with a `restart` of the launcher, or, under another launcher,
    with the `start` of a training loop.
    """
    found: list[Attempt] = []
    for event in filter(_timed, events):
        if event["kind"] == "change":
            continue  # recorded before the `launch` that it belongs to
        again = event["kind"] == "start" and found and found[-1].started is not None
        if begins(event) or again or not found:
            automatic = event["kind"] == "restart"
            if found and automatic:
                found[-1].noticed = time_of(event)
            found.append(Attempt(automatic=automatic))
        found[-1].events.append(event)
    return found


def begins(event: Event) -> bool:
    """Whether processes are started here. A worker's own `restart`, with no attempt, says
    that nothing was saved."""
    return event["kind"] == "launch" or (event["kind"] == "restart" and "attempt" in event)


def time_of(event: Event) -> float:
    """Seconds since the epoch. Raises ValueError for a time that is none."""
    return datetime.fromisoformat(str(event["time"])).timestamp()


def number(event: Event, name: str) -> float | None:
    """A field that is a number, also one written as `NaN`. None if it is missing."""
    value = event.get(name)
    try:
        return None if value is None else float(value)
    except (OverflowError, TypeError, ValueError):
        return None


def of_plan(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """The predictions of a plan.json. Empty if it is damaged."""
    predicted = plan.get("predicted")
    return predicted if isinstance(predicted, dict) else {}


def amount(event: Event, name: str) -> float | None:
    """A field that counts or measures. None when it is missing, negative or beyond measure."""
    value = number(event, name)
    return value if value is not None and 0 <= value < _MOST else None


def step_of(event: Event) -> int | None:
    """Optimizer steps done."""
    value = amount(event, "step")
    return None if value is None else int(value)


def seconds_of(events: Iterable[Event], name: str = "seconds") -> float:
    """The sum of a field over events."""
    return sum(amount(event, name) or 0.0 for event in events)


def windows(
    found: Sequence[Attempt], unlogged_tail_s: float
) -> Iterator[tuple[Attempt, float, float]]:
    """Each start with its begin and end.

    A start ends with its last `end` event, or when the launcher restarted it. A start that was
    killed leaves neither. Its last event and the time of the steps that the next start repeats
    give its end. For the last start, `unlogged_tail_s` stands for that time.
    """
    for index, one in enumerate(found):
        following = found[index + 1] if index + 1 < len(found) else None
        end = one.last_event
        if one.noticed is not None:
            end = one.noticed
        elif not one.of("end") and not one.of("failure"):
            end += unlogged_tail_s if following is None else following.replay_s
        if following is not None:
            end = min(end, following.began)
        yield one, one.began, max(one.began, end)


def _timed(event: Event) -> bool:
    try:
        return bool(event["kind"]) and time_of(event) > 0
    except (KeyError, ValueError):
        return False
