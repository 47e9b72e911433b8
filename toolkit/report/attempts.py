"""The starts of a run: its events, cut where `dmt launch` or a restart began again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Event = Mapping[str, Any]


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
            return time_of(event) - (number(event, "seconds") or 0.0)
        return time_of(first)

    def seconds(self, kind: str, name: str = "seconds") -> float:
        """The sum of a field over its events of a kind."""
        return sum(number(event, name) or 0.0 for event in self.of(kind))

    @property
    def hung(self) -> float | None:
        """When it came to a halt. None if nothing hung. The event is written `idle_s` later,
        when the halt is found."""
        for event in self.of("hang"):
            return time_of(event) - (number(event, "idle_s") or 0.0)
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
    """The starts of a run, in the order of the file.

    A start begins with `launch`, with a `restart` of the launcher, or, under another launcher,
    with the `start` of a training loop.
    """
    found: list[Attempt] = []
    for event in events:
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
    """Whether processes are started here."""
    return event["kind"] in ("launch", "restart")


def time_of(event: Event) -> float:
    """Seconds since the epoch."""
    return datetime.fromisoformat(str(event["time"])).timestamp()


def number(event: Event, name: str) -> float | None:
    """A field that is a number, also one written as `NaN`. None if it is missing."""
    value = event.get(name)
    return None if value is None else float(value)


def step_of(event: Event) -> int | None:
    """Optimizer steps done. None for an event that belongs to no step."""
    step: int | None = event.get("step")
    return step


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
            end += unlogged_tail_s if following is None else following.seconds("replay")
        if following is not None:
            end = min(end, following.began)
        yield one, one.began, max(one.began, end)
