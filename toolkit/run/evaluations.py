"""What evaluators found about a run's weights: `RUN/evaluations/step-N.NAME.json`, and events.

A file is one object: `evaluator` (its name), `step`, `time`, `settings`, and `findings`, which
are `{TASK: {METRIC: number}}` of `tasks` and `[{prompt, completion}]` of `samples`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.run.recorded import MAPPING, checked
from toolkit.system.untrusted import read_json

TASKS, SAMPLES = "tasks", "samples"
ERROR_OF = "_stderr"
"""Behind the name of a metric, in the name of its standard error."""


@dataclass(frozen=True)
class Recorded:
    """One evaluator's findings about the weights of one step."""

    evaluator: str
    step: int
    settings: Mapping[str, Any]
    findings: Any


def record(run: RunDirectory, event: str, recorded: Recorded, **fields: Any) -> None:
    """Write the findings into the run: their file, and an event of this kind."""
    name, step = recorded.evaluator, recorded.step
    run.evaluations.mkdir(parents=True, exist_ok=True)
    content = {
        "evaluator": name,
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": recorded.settings,
        "findings": recorded.findings,
    }
    path = run.evaluations / f"step-{step:08d}.{name}.json"
    jsonl.write_atomically(path, jsonl.document(content))
    numbers = dict(numbers_of(recorded.findings, name))
    shown = numbers or {name: recorded.findings}
    EventLog(run.events).write(event, **{**shown, "step": step}, **fields)  # type: ignore[arg-type]


def recorded(run: RunDirectory) -> list[Recorded]:
    """All findings that can be read, the newest step last."""
    return [one for path in sorted(run.evaluations.glob("step-*.json")) for one in _read(path)]


def last(run: RunDirectory, evaluator: str) -> Recorded | None:
    """The findings of one evaluator about the newest weights."""
    return next((one for one in reversed(recorded(run)) if one.evaluator == evaluator), None)


def numbers_of(findings: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number by its path, e.g. `tasks/arc_easy/acc`."""
    if isinstance(findings, Mapping):
        for key, value in findings.items():
            yield from numbers_of(value, f"{name}/{key}")
    elif isinstance(findings, int | float) and not isinstance(findings, bool):
        yield name, float(findings)


def metrics(tasks: Recorded) -> Iterator[tuple[str, str, float, float | None]]:
    """Task, metric, value and standard error, if there is one."""
    for task, found in tasks.findings.items():
        for metric, value in found.items():
            name, comma, of_filter = metric.partition(",")
            if not name.endswith(ERROR_OF):
                yield task, metric, value, found.get(f"{name}{ERROR_OF}{comma}{of_filter}")


def _read(path: Path) -> Iterator[Recorded]:
    try:
        found = checked(MAPPING, read_json(path))
        yield Recorded(
            str(found["evaluator"]),
            int(found["step"]),
            dict(found["settings"]),
            found["findings"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return
