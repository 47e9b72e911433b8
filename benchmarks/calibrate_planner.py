"""Fits the time model's calibrated constants to published step times, and checks them.

    python benchmarks/calibrate_planner.py CASES.json [--skip SOURCE …]

CASES is a file of published cases (`published.py`). Prints the fitted values next to
those of `toolkit/plan/cost/efficiency.py`, the errors per source with all sources, and, for
every source, the errors when the constants are fitted without it. Nothing is written: values
are copied into the table by hand, rounded.

The fit is least squares on the logarithm of predicted over measured step time (Gauss-Newton,
numpy). Every source weighs the same; cases that are more than 8% off pull no harder than
that; and every constant is held near its prior by its `spread`.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from published import Case

from toolkit.errors import PlanError
from toolkit.plan.cost.efficiency import DEFAULT, TABLE, Efficiency
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import Setup

FITTED = tuple(name for name, constant in TABLE.items() if constant.spread)
ROUNDS = 8
NUDGE = 0.02
"""Change of a constant's logarithm for its derivative."""
OUTLIER = 0.08
NOISE = 0.012
"""Error of a whole source that counts as much as a constant off by its spread."""


@dataclass(frozen=True)
class Measured:
    """A published run."""

    source: str
    setup: Setup
    step_time_s: float


def main() -> None:
    """Fit on all sources, then without each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", type=Path)
    parser.add_argument("--skip", nargs="*", default=[], help="sources that are not fitted")
    arguments = parser.parse_args()
    runs = read_runs(arguments.cases)
    used = [run for run in runs if run.source not in arguments.skip]
    fitted = fit(used)
    print(f"{'constant':28s} {'prior':>8s} {'table':>8s} {'fitted':>8s}")
    for name in FITTED:
        print(f"{name:28s} {TABLE[name].prior:8.4g} {DEFAULT[name]:8.4g} {fitted[name]:8.4g}")
    print_errors("with the table's constants", DEFAULT, runs)
    print_errors("fitted on all sources", fitted, runs)
    print("\nfitted without the source")
    for source in sorted({run.source for run in used}):
        without = fit([run for run in used if run.source != source])
        print_row(source, errors(without, [run for run in runs if run.source == source]))


def read_runs(path: Path) -> list[Measured]:
    """The cases that report a step time or a throughput."""
    runs = []
    for fields in json.loads(path.read_text(encoding="utf-8")):
        seconds = reported_step_time(fields)
        if seconds is None:
            continue
        try:
            setup = Case(fields).setup()
        except PlanError as error:
            print(f"{fields['id']}: left out: {error}")
            continue
        runs.append(Measured(fields["source"], setup, seconds))
    return runs


def reported_step_time(fields: dict[str, Any]) -> float | None:
    """Seconds per step as reported, or by the reported throughput."""
    reported = fields["reported"]
    for name in ("step_time_s", "derived_step_time_s"):
        if isinstance(reported.get(name), int | float):
            return float(reported[name])
    rate, batch = reported.get("tokens_per_s_per_gpu"), fields["batch"].get("global")
    if not rate or not batch or not fields["model"].get("seq"):
        return None
    return float(batch * fields["model"]["seq"] / (rate * fields["hardware"]["n_gpus"]))


def errors(efficiency: Efficiency, runs: Sequence[Measured]) -> np.ndarray:
    """Logarithm of predicted over measured step time, by run."""
    return np.array([log(_predicted(run.setup, efficiency) / run.step_time_s) for run in runs])


def _predicted(setup: Setup, efficiency: Efficiency) -> float:
    return step_time(*setup[:3], efficiency).total_s


def fit(runs: Sequence[Measured]) -> Efficiency:
    """The constants that predict `runs` best."""
    sources = Counter(run.source for run in runs)
    weights = np.array([sources[run.source] ** -0.5 for run in runs]) / NOISE
    start = np.log([TABLE[name].prior or DEFAULT[name] for name in FITTED])
    hold = 1 / np.array([TABLE[name].spread for name in FITTED])
    values = start.copy()
    for _ in range(ROUNDS):
        found = errors(_with(values), runs)
        slopes = np.stack(
            [
                (errors(_with(values + NUDGE * unit), runs) - found) / NUDGE
                for unit in np.eye(len(values))
            ],
            axis=1,
        )
        pull = weights * np.sqrt(np.minimum(1, OUTLIER / np.maximum(abs(found), 1e-9)))
        rows = np.vstack([slopes * pull[:, None], np.diag(hold)])
        target = np.concatenate([-found * pull, (start - values) * hold])
        values += np.clip(np.linalg.lstsq(rows, target, rcond=None)[0], -0.3, 0.3)
    return _with(values)


def _with(logarithms: np.ndarray) -> Efficiency:
    changed = {name: exp(value) for name, value in zip(FITTED, logarithms, strict=True)}
    return Efficiency({**DEFAULT.values, **changed})


def print_errors(title: str, efficiency: Efficiency, runs: Sequence[Measured]) -> None:
    """One row per source."""
    by_source = defaultdict(list)
    for run, error in zip(runs, errors(efficiency, runs), strict=True):
        by_source[run.source].append(error)
    print(f"\n{title}")
    for source, found in by_source.items():
        print_row(source, np.array(found))


def print_row(source: str, found: np.ndarray) -> None:
    """Errors of step time, as score.py counts them."""
    relative = np.exp(found) - 1
    print(
        f"{source:24s} n {len(found):4d}  mean {abs(relative).mean():6.1%}  "
        f"bias {relative.mean():+6.1%}  max {abs(relative).max():6.1%}"
    )


if __name__ == "__main__":
    main()
