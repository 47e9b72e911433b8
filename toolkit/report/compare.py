"""What differs between runs: settings, the first loss that differs, speed and loss."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.report.attempts import number, step_of
from toolkit.report.goodput import Metrics
from toolkit.report.record import RunRecord
from toolkit.run.changes import differences

ROUNDING = 1e-5
"""Relative difference of losses up to which layouts agree (tests/engines/test_parity.py)."""


@dataclass(frozen=True)
class LossPair:
    """Training losses of two runs at the same step."""

    step: int
    first: float
    other: float

    @property
    def change(self) -> float:
        """Relative to the first run."""
        return (self.other - self.first) / abs(self.first) if self.first else float("nan")


@dataclass(frozen=True)
class RunDifference:
    """A run next to the first one."""

    steps: int
    """Steps that both runs logged."""
    unequal: LossPair | None
    """The first losses that differ at all."""
    beyond: LossPair | None
    """The first losses that differ by more than rounding."""
    last: LossPair | None
    """The losses at the last step that both logged."""
    speed: float | None
    """Median tokens per second over that of the first run."""

    def losses(self) -> str:
        """From which step on the losses differ, and those of the last step."""
        if not self.steps:
            return "no step was logged in both"
        if self.unequal is None:
            return f"equal to the last bit at all {self.steps:,} steps logged in both"
        said = f"differs first at step {self.unequal.step:,}"
        if (pair := self.beyond) is None:
            return f"{said}, nowhere by more than rounding ({ROUNDING:g} relative)"
        if pair.step != self.unequal.step:
            said += f", by more than rounding at step {pair.step:,}"
        said += f": {pair.other:.6g} instead of {pair.first:.6g}, {pair.change:+.2g} relative"
        if (last := self.last) is not None and last != pair:
            said += f"; at step {last.step:,} {last.other:.6g} instead of {last.first:.6g}"
        return said


def names_of(records: Sequence[RunRecord]) -> list[str]:
    """Short names of the run directories. For several, the part of the path that differs."""
    paths = [str(record.run.path) for record in records]
    folder = os.path.commonpath([Path(path).absolute().parent for path in paths])
    return paths[:1] if len(paths) == 1 else [os.path.relpath(path, folder) for path in paths]


def settings_that_differ(records: Sequence[RunRecord]) -> dict[str, list[object]]:
    """Dotted name → the value in each run: of recipes (not their `name`), layouts and
    environments."""
    first, *others = [_tree(record) for record in records]
    found: dict[str, list[object]] = {}
    for index, other in enumerate(others, start=1):
        for key, mine, theirs in differences(first, other):
            found.setdefault(key, [mine] * len(records))[index] = theirs
    return found


def _tree(record: RunRecord) -> dict[str, Any]:
    recipe = {key: value for key, value in record.recipe.items() if key != "name"}
    plan = {name: record.plan.get(name) for name in ("engine", "model", "layout")}
    return {**_by_number(recipe), "plan": plan, "environment": dict(record.environment)}


def _by_number(value: Any) -> Any:
    """A list of sections as one map, so that each setting is compared by itself."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = {str(index): one for index, one in enumerate(value)}
    if isinstance(value, dict):
        return {key: _by_number(one) for key, one in value.items()}
    return value


def difference(first: RunRecord, other: RunRecord) -> RunDifference:
    """Compare a run with the first one, over the steps that both logged."""
    mine, theirs = _losses(first.metrics), _losses(other.metrics)
    pairs = [LossPair(step, mine[step], theirs[step]) for step in mine if step in theirs]
    # By their texts, in which NaN equals NaN.
    unequal = [one for one in pairs if repr(one.first) != repr(one.other)]
    speeds = median_speed(first.metrics), median_speed(other.metrics)
    return RunDifference(
        steps=len(pairs),
        unequal=unequal[0] if unequal else None,
        # NaN against a number is a difference, too.
        beyond=next((one for one in unequal if not abs(one.change) <= ROUNDING), None),
        last=pairs[-1] if pairs else None,
        speed=speeds[1] / speeds[0] if speeds[0] and speeds[1] else None,
    )


def median_speed(metrics: Sequence[Metrics]) -> float | None:
    """Median tokens per second. The first line, a warm-up, counts only if it is the only
    one."""
    speeds = [speed for line in metrics if (speed := number(line, "tokens_per_s")) is not None]
    return statistics.median(speeds[1:] or speeds) if speeds else None


def _losses(metrics: Sequence[Metrics]) -> dict[int, float]:
    return {
        step: loss
        for line in metrics
        if (step := step_of(line)) is not None
        if (loss := number(line, "loss")) is not None
    }
