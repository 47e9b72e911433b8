"""Curves of any length as few points, with every bucket's lowest and highest one."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from toolkit.report.attempts import number, step_of
from toolkit.report.goodput import Metrics

AXES = ("step", "tokens", "hours")
"""What curves are drawn over: optimizer steps, trained tokens, hours of training."""
_SECONDS_PER_HOUR = 3600


def kept(values: Sequence[float], buckets: int) -> Sequence[int]:
    """Indices of `values` to draw: all of a short curve; of a long one, of each of so many
    equal buckets the lowest and the highest, and the first that is no finite number."""
    if len(values) <= 2 * buckets:
        return range(len(values))
    found = {0, len(values) - 1}
    for bucket in range(buckets):
        start, stop = (len(values) * edge // buckets for edge in (bucket, bucket + 1))
        part = values[start:stop]
        low, high = min(part), max(part)
        if math.isfinite(sum(part)):
            found |= {start + part.index(low), start + part.index(high)}
            continue
        finite = [(value, at) for at, value in enumerate(part, start) if math.isfinite(value)]
        found.add(next(at for at, value in enumerate(part, start) if not math.isfinite(value)))
        if finite:
            found |= {min(finite)[1], max(finite)[1]}
    return sorted(found)


def short(value: float | None) -> float | None:
    """Six digits; None, which JSON has, for what is no finite number."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Curves:
    """The logged lines of a run by column."""

    metrics: Sequence[Metrics]
    """Those that state their step, in order."""

    @classmethod
    def of(cls, metrics: Sequence[Metrics]) -> "Curves":
        """Lines without a step, or behind a later one, are left out."""
        lines, before = [], -math.inf
        for line in metrics:
            step = step_of(line)
            if step is not None and step > before:
                lines.append(line)
                before = step
        return cls(lines)

    @cached_property
    def x(self) -> Mapping[str, list[float]]:
        """Of each line, its place on each of `AXES`; NaN where a line does not say it."""
        steps = [float(line["step"]) for line in self.metrics]
        tokens = self.column("consumed_tokens")
        hours, total, before = [], 0.0, 0.0
        for step, each in zip(steps, self.column("step_time_s"), strict=True):
            total += 0.0 if math.isnan(each) else (step - before) * each / _SECONDS_PER_HOUR
            hours.append(total)
            before = step
        return dict(zip(AXES, (steps, tokens, hours), strict=True))

    def column(self, name: str) -> list[float]:
        """One value per line; NaN where there is none."""
        values = [line.get(name) for line in self.metrics]
        if all(type(value) is float for value in values):
            return values  # type: ignore[return-value]  # as it is nearly always
        found = (number(line, name) for line in self.metrics)
        return [math.nan if value is None else value for value in found]

    @cached_property
    def names(self) -> list[str]:
        """Everything that lines state, in the order of the first that does."""
        return [*dict.fromkeys(name for line in self.metrics for name in line)]

    @cached_property
    def _from_zero(self) -> Mapping[str, list[float]]:
        return {axis: [0.0, *values] for axis, values in self.x.items()}

    def place(self, step: float) -> dict[str, float | None]:
        """A step on each of `AXES`: between two logged lines, in proportion."""
        found: dict[str, float | None] = {"step": short(step)}
        steps = self._from_zero["step"]
        at = max(0, bisect_right(steps, step) - 1)
        for name in AXES[1:]:
            values = self._from_zero[name]
            value = values[at]
            if at + 1 < len(steps):
                share = (step - steps[at]) / (steps[at + 1] - steps[at])
                value += share * (values[at + 1] - values[at])
            found[name] = short(value)
        return found

    def points(self, name: str, buckets: int) -> dict[str, list[Any]] | None:
        """A column over each axis, thinned; None where no line has a finite value."""
        return self.thinned(self.column(name), buckets)

    def thinned(self, values: Sequence[float], buckets: int) -> dict[str, list[Any]] | None:
        """One value per line over each axis; None where none is finite."""
        if not any(map(math.isfinite, values)):
            return None
        chosen = kept(values, buckets)
        if len(chosen) == len(values):
            return {**self._whole_x, "y": [*map(short, values)]}
        found = {axis: [short(self.x[axis][at]) for at in chosen] for axis in AXES}
        return {**found, "y": [short(values[at]) for at in chosen]}

    @cached_property
    def _whole_x(self) -> Mapping[str, list[float | None]]:
        """`x` as every short curve has it."""
        return {axis: [*map(short, values)] for axis, values in self.x.items()}
