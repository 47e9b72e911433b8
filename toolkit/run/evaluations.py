"""What evaluators found about a run's weights: `RUN/evaluations/step-N.NAME.json`, and events.

A file is one object: `evaluator` (its name), `step`, `time`, `settings`, and `findings`, which
are `{TASK: {METRIC: number}}` of `tasks` and `[{prompt, completion}]` of `samples`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

from toolkit.run import jsonl
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.system.atomic import write_atomically
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


class Score(NamedTuple):
    """One number of an evaluation on a task."""

    task: str
    metric: str
    value: float
    error: float | None
    step: int


_RECORDED = TypeAdapter(Recorded)
_FINDINGS: dict[str, TypeAdapter[Any]] = {
    TASKS: TypeAdapter(dict[str, dict[str, float]]),
    SAMPLES: TypeAdapter(list[dict[Literal["prompt", "completion"], str]]),
}


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
    write_atomically(path, jsonl.document(content))
    numbers = dict(numbers_of(recorded.findings, name))
    shown = numbers or {name: recorded.findings}
    EventLog(run.events).write(event, **{**shown, "step": step}, **fields)  # type: ignore[arg-type]


def recorded(run: RunDirectory) -> list[Recorded]:
    """All findings that can be read, the newest step last."""
    return [one for path in sorted(run.evaluations.glob("step-*.json")) for one in _read(path)]


def numbers_of(findings: Any, name: str) -> Iterator[tuple[str, float]]:
    """Every number by its path, e.g. `tasks/arc_easy/acc`."""
    if isinstance(findings, Mapping):
        for key, value in findings.items():
            yield from numbers_of(value, f"{name}/{key}")
    elif isinstance(findings, int | float) and not isinstance(findings, bool):
        yield name, float(findings)


def described(one: Recorded) -> Iterator[str]:
    """The findings in words: a line for each metric of a task, or completion."""
    if one.evaluator == SAMPLES:
        yield from (f"{found['prompt']!r} → {found['completion']!r}" for found in one.findings)
    elif one.evaluator != TASKS:
        yield f"{one.evaluator}: {one.findings}"
    else:
        for score in scores([one]):
            spread = "" if score.error is None else f" ± {score.error:.4f}"
            yield f"{score.task} {score.metric} {score.value:.4f}{spread}"


def scores(found: Iterable[Recorded]) -> Iterator[Score]:
    """The numbers of all tasks, each with its standard error."""
    for one in found:
        for task, metrics in one.findings.items() if one.evaluator == TASKS else ():
            for metric, value in metrics.items():
                name, comma, of_filter = metric.partition(",")
                error = metrics.get(f"{name}{ERROR_OF}{comma}{of_filter}")
                if not name.endswith(ERROR_OF):
                    shown = None if error is None else float(error)
                    yield Score(task, metric, float(value), shown, one.step)


def _read(path: Path) -> Iterator[Recorded]:
    try:
        found = _RECORDED.validate_python(read_json(path))
        if schema := _FINDINGS.get(found.evaluator):
            schema.validate_python(found.findings)
        yield found
    except (OSError, ValueError):
        return
