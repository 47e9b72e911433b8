"""What the page draws: curves of one or several runs, and marks where something was."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import EXIT_DONE
from toolkit.extras.page.sections import Section
from toolkit.extras.page.thinning import Curves, short
from toolkit.report.attempts import Event, amount, number, of_plan, step_of
from toolkit.report.record import RunRecord
from toolkit.run.events import VALIDATION

BUCKETS = 400
"""Of a curve with more points than twice as many; a chart is about as many pixels wide."""
MOST_MARKS = 200
"""Markers of a run, the last ones; the page says how many there are."""
MOST_CHARTS = 40
"""Charts of all runs; the page says which metrics have none."""
_KNOWN = {
    "loss": ("Loss", "nats, or as the objective defines it"),
    "grad_norm": ("Gradient norm", "global L2 norm before clipping"),
    "lr": ("Learning rate", ""),
    "tokens_per_s": ("Throughput", "tokens per second, all ranks"),
    "mfu": ("Model FLOPs utilisation", "share of the devices' peak"),
    "step_time_s": ("Step time", "seconds per step, mean since the last logged one"),
    "memory_gib": ("Device memory", "GiB, peak of the fullest rank"),
}
"""Metrics of every run: title and unit."""
_IN_OTHERS = ("step", "tokens", "consumed_samples", "consumed_tokens", "skipped", "data_wait_s")
"""Not charts of their own."""
MARKS = {
    "skip": ("skipped", "#d97706"),
    "restart": ("restarted", "#d1242f"),
    "resume": ("resumed", "#1a9a78"),
    "hang": ("hung", "#d1242f"),
    "change": ("setting changed", "#8a6fd8"),
    "signal": ("signal", "#8a6fd8"),
    "end": ("ended", "#d1242f"),
}
"""Events that are marked: the word for each, and its colour."""


def charts(records: Sequence[RunRecord], curves: Sequence[Curves]) -> list[dict[str, Any]]:
    """All charts; each has curves of one or several runs. Metrics for whose charts there is no
    room are named among what is missing of their run."""
    buckets = max(50, BUCKETS // len(records))
    others = dict.fromkeys(
        name for one in curves for name in one.names if name not in (*_KNOWN, *_IN_OTHERS)
    )
    found = [_chart(name, records, curves, buckets) for name in (*_KNOWN, *others)]
    drawn = [chart for chart in found if chart is not None]
    left_out = [chart["id"] for chart in drawn[MOST_CHARTS:]]
    for record, one in zip(records, curves, strict=True):
        if names := [name for name in left_out if name in one.names]:
            record.missing.append(
                f"metrics.jsonl: {len(names)} metrics are not drawn, a page has at most "
                f"{MOST_CHARTS} charts: {', '.join(names)}"
            )
    return drawn[:MOST_CHARTS]


def _chart(
    name: str, records: Sequence[RunRecord], curves: Sequence[Curves], buckets: int
) -> dict[str, Any] | None:
    """A metric of all runs, with what it is shown with and what it shows in words; None where
    no run has it."""
    title, unit = _KNOWN.get(name, (name, ""))
    lines: list[dict[str, Any]] = [
        {"run": run, "label": "", **points}
        for run, one in enumerate(curves)
        if (points := one.points(name, buckets)) is not None
    ]
    for run, (record, one) in enumerate(zip(records, curves, strict=True)):
        lines += [{"run": run, **line} for line in _beside(name, record, one, buckets)]
    if not lines:
        return None
    if any(one.is_thinned(buckets) for one in curves):
        unit = f"{unit}{'; ' if unit else ''}thinned: lowest and highest of each range"
    drawn = [value for value in lines[0]["y"] if value is not None]
    said = "no finite value"
    if drawn:
        said = (
            f"from {drawn[0]:g} to {drawn[-1]:g}, lowest {min(drawn):g}, highest {max(drawn):g}"
        )
    return {"id": name, "title": title, "unit": unit, "lines": lines, "said": said}


def _beside(
    name: str, record: RunRecord, one: Curves, buckets: int
) -> Iterator[Mapping[str, Any]]:
    """What a metric is shown with: validation, a part of it, or what the plan predicted."""
    if name == "loss":
        for column, label in _validations(record):
            if points := _evaluated(column, record):
                yield {"label": label, "kind": "points", **points}
    if name == "step_time_s" and (points_ := one.points("data_wait_s", buckets)):
        yield {"label": "waiting for data", "kind": "part", **points_}
    promised = _promised(name, record.plan)
    if promised is not None and one.metrics and one.points(name, 1) is not None:
        basis = of_plan(record.plan).get("basis")
        label = "predicted, for a nominal CPU" if basis == "nominal" else "predicted"
        ends = [one.steps[0], one.steps[-1]]
        yield {"label": label, "kind": "predicted", "step": ends, "y": [short(promised)] * 2}


def _promised(name: str, plan: Mapping[str, Any]) -> float | None:
    """What the plan predicts for a metric."""
    predicted = of_plan(plan)
    if name in ("step_time_s", "memory_gib"):
        return number(predicted, name)
    if name == "mfu":
        return number(plan, "mfu")
    layout, each = plan.get("layout"), number(plan, "tokens_per_s_per_gpu")
    if name != "tokens_per_s" or each is None or not isinstance(layout, dict):
        return None
    ranks = [number(layout, degree) or 1.0 for degree in ("dp", "tp", "pp", "cp")]
    return each * ranks[0] * ranks[1] * ranks[2] * ranks[3]


def _validations(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The columns of validation losses, of all sources together first, with their labels."""
    evaluated = [event for event in record.events if event.get("kind") == "evaluation"]
    names = dict.fromkeys(name for event in evaluated for name in event)
    yield "loss", "validation"
    yield from ((name, name) for name in names if name.startswith(VALIDATION))


def _evaluated(name: str, record: RunRecord) -> dict[str, list[Any]] | None:
    """A column of the validations; of a step that was evaluated twice, the last."""
    found = {
        step: value
        for event in record.events
        if event.get("kind") == "evaluation" and (step := step_of(event)) is not None
        if (value := number(event, name)) is not None
    }
    if not found:
        return None
    return {"step": sorted(found), "y": [short(found[step]) for step in sorted(found)]}


def marks(record: RunRecord) -> list[dict[str, Any]]:
    """Where something happened to a run, in the order of its events; of steps that were done
    again, both times."""
    found = []
    for event in record.events:
        kind = str(event.get("kind"))
        if kind == "restart" and "attempt" not in event:
            continue  # a worker's own: it says that nothing was saved
        if kind == "end" and number(event, "exit_code") == EXIT_DONE:
            continue  # as every run does
        step = amount(event, "step" if "step" in event else "from_step")
        if kind in MARKS and step is not None:
            word, tone = MARKS[kind]
            time = str(event.get("time", ""))[:19].replace("T", " ")
            mark = {"word": word, "tone": tone, "step": step, "time": time}
            found.append({**mark, "what": _what(event)})
    return found


def happened(found: Sequence[Mapping[str, Any]]) -> Iterator[Section]:
    """The last marks in words; nothing without any."""
    shown = found[-MOST_MARKS:]
    if rows := [[f"{one['step']:g}", one["word"], one["time"], one["what"]] for one in shown]:
        note = f"The last {len(rows)} of {len(found)}." if len(found) > len(rows) else ""
        table = [["step", "", "time (UTC)", "why"], *rows]
        yield {"title": "What happened", "note": note, "table": table}


def _what(event: Event) -> str:
    """An event in words: its own, where it has some."""
    for name in ("why", "reason", "error", "signal", "message"):
        if event.get(name):
            return str(event[name])
    if event.get("kind") == "end":
        return f"rank {event.get('rank', 0)}, exit code {event.get('exit_code')}"
    if event.get("kind") == "resume":
        return f"{event.get('dropped_metrics_lines', 0)} logged steps are done again"
    own = {key: value for key, value in event.items() if key not in ("time", "kind", "step")}
    return ", ".join(f"{key} {value}" for key, value in own.items())
