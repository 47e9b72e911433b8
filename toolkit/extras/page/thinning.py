"""Curves of any length as few points, with every bucket's lowest and highest one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from toolkit.report.attempts import number, step_of
from toolkit.report.goodput import Metrics


def kept(values: Sequence[float], buckets: int) -> Sequence[int]:
    """Indices of `values` to draw: all of a short curve; of a long one, of each of so many
    equal buckets the lowest and the highest, and the first that is no finite number."""
    if len(values) <= 2 * buckets:
        return range(len(values))
    found = {0, len(values) - 1}
    for bucket in range(buckets):
        start, stop = (len(values) * edge // buckets for edge in (bucket, bucket + 1))
        finite = [(values[at], at) for at in range(start, stop) if math.isfinite(values[at])]
        gaps = (at for at in range(start, stop) if not math.isfinite(values[at]))
        found |= {at for _, at in (min(finite), max(finite))} if finite else set()
        found |= {*islice(gaps, 1)}
    return sorted(found)


def short(value: float | None) -> float | None:
    """Six digits; None, which JSON has, for what is no finite number."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Curves:
    """The logged lines of a run by column."""

    metrics: Sequence[Metrics]
    """Metrics that state their step, in order."""

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

    @property
    def steps(self) -> list[float]:
        """The step of each line."""
        return [float(line["step"]) for line in self.metrics]

    @property
    def names(self) -> list[str]:
        """Everything that lines state, in the order of the first that does."""
        return [*dict.fromkeys(name for line in self.metrics for name in line)]

    def is_thinned(self, buckets: int) -> bool:
        """Whether not every line is drawn."""
        return len(self.metrics) > 2 * buckets

    def points(self, name: str, buckets: int) -> dict[str, list[Any]] | None:
        """A column over the steps, thinned; None where no line has a finite value."""
        stated = (number(line, name) for line in self.metrics)
        values = [math.nan if value is None else value for value in stated]
        if not any(map(math.isfinite, values)):
            return None
        chosen = kept(values, buckets)
        return {
            "step": [short(self.steps[at]) for at in chosen],
            "y": [short(values[at]) for at in chosen],
        }
