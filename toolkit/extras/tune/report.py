"""What a tuning for throughput reports: a table and machine output."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from rich.text import Text

from toolkit.cli.output import Line, Table, columns
from toolkit.extras.tune.throughput import Measurement, Tuning, fastest
from toolkit.plan.dimensions import layout_text
from toolkit.plan.search import Candidate
from toolkit.text.units import seconds, size

WORDS: Mapping[str, tuple[str, str]] = {
    "done": ("measured", "green"),
    "stopped": ("given up", "dim"),
    "out_of_memory": ("out of memory", "red"),
    "hung": ("hung", "red"),
    "failed": ("failed", "red"),
}
"""How the end of a trial is called, and its colour."""


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning."""

    tuning: Tuning
    results: Sequence[Measurement]
    file: Path
    """The recipe with the fastest layout."""
    factor: float | None
    """Predicted over measured seconds per step."""

    @property
    def order(self) -> list[Measurement]:
        """The fastest first, then what was given up, then what did not run."""
        return sorted(
            self.results,
            key=lambda one: (
                [*WORDS].index(one.ending),
                one.step_time_s or 0.0,
                one.number,
            ),
        )

    def tokens_per_s(self, one: Measurement) -> float | None:
        """Of all ranks: tokens of the global batch per second."""
        training = self.tuning.recipe.training
        rows = training.global_batch_size * training.rows_per_sample
        tokens = rows * training.sequence_length
        return None if one.step_time_s is None else tokens / one.step_time_s

    def machine_output(self) -> dict[str, Any]:
        """What `--json` prints."""
        best = fastest(self.results)
        return {
            "recipe": str(self.tuning.path),
            "directory": str(self.tuning.folder),
            "considered": len(self.tuning.search.fitting),
            "best": best and asdict(best),
            "planned": layout_text(*_planned(self.tuning)),
            "tuned": str(self.file),
            "predicted_over_measured": self.factor,
            "trials": [
                asdict(one) | {"tokens_per_s": self.tokens_per_s(one)} for one in self.order
            ],
        }


def _planned(tuning: Tuning) -> tuple[str, str, Any]:
    best = tuning.search.best
    return best.pair.engine, best.pair.model, best.layout


def planned_lines(candidates: Sequence[Candidate]) -> list[str]:
    """What would be measured: `--dry-run`."""
    rows = [
        [str(number), layout_text(*one.pair, one.layout), seconds(one.step_s or 0.0),
         size(one.memory_gib)]
        for number, one in enumerate(candidates)
    ]  # fmt: skip
    return columns([["#", "layout", "predicted", "memory"], *rows], left=2)


def _table(tuned: Tuned) -> Table[Measurement]:
    """Measured next to predicted."""

    def speed(one: Measurement) -> str:
        found = tuned.tokens_per_s(one) if one.measured else None
        return "-" if found is None else f"{found:,.0f}"

    return Table(
        {
            "#": lambda one: str(one.number),
            "layout": lambda one: one.layout,
            "measured": lambda one: (
                "-" if one.step_time_s is None else seconds(one.step_time_s)
            ),
            "predicted": lambda one: seconds(one.predicted_s),
            "tokens/s": speed,
            "outcome": lambda one: WORDS[one.ending][0],
        },
        left=2,
    )


def _reasons(tuned: Tuned) -> list[str]:
    """Why layouts were not measured to the end, by their numbers in the table."""
    return [
        f"#{one.number} {WORDS[one.ending][0]}: {one.reason}"
        for one in tuned.order
        if one.reason
    ]


def lines(tuned: Tuned) -> list[Line]:
    """The table, and what to do with it."""
    best = fastest(tuned.results)
    rows = _table(tuned).coloured(tuned.order, lambda one: WORDS[one.ending])
    found: list[Line] = []
    for row, line in rows:
        found.append(Text(line.plain, "bold green") if best and row is best else line)
    found += [*_reasons(tuned), ""]
    if best is None:
        return found
    planned = layout_text(*_planned(tuned.tuning))
    own = next((one for one in tuned.results if one.layout == planned and one.measured), None)
    if own is best:
        found.append(f"fastest: {best.layout}, which is the planner's choice, too")
    elif own is not None and own.step_time_s and best.step_time_s:
        gain = own.step_time_s / best.step_time_s
        found.append(f"fastest: {best.layout}, {gain:.2f} × as fast as the planner's choice")
    else:
        found.append(f"fastest: {best.layout}")
    found.append(f"wrote {tuned.file}: dmt launch {quote(str(tuned.file))}")
    if tuned.factor is not None:
        found.append(
            f"predicted steps take {tuned.factor:.2f} × as long as measured ones (median)"
        )
    return [*found, f"trials are in {tuned.tuning.folder}/trials"]
