"""The charts of the page: curves of one or several runs, and marks where something happened."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import EXIT_DONE
from toolkit.report.attempts import Event, number, step_of
from toolkit.report.goodput import Metrics
from toolkit.report.record import RunRecord
from toolkit.run.events import VALIDATION

BUCKETS = 400
"""Points of a thinned curve are chosen from so many buckets. A curve with up to twice as many
points is shown whole. A chart is about as many pixels wide."""
MOST_MARKS = 200
"""Most marks of a run. The last ones are kept, and the page says how many there are."""
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
"""Metrics that have no chart of their own."""
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

Columns = Mapping[str, Sequence[float]]
"""The numbers of a run's logged lines by name. NaN where a line has none."""
Chart = dict[str, Any]


def columns(metrics: Sequence[Metrics]) -> Columns:
    """All numbers that lines state, by name in the order of first appearance. Lines without a
    step, or after a line of a later step, are left out."""
    lines, before = [], -math.inf
    for line in metrics:
        step = step_of(line)
        if step is not None and step > before:
            lines.append(line)
            before = step
    names = dict.fromkeys(name for line in lines for name in line)
    return {name: [_number(line, name) for line in lines] for name in names}


def _number(line: Metrics, name: str) -> float:
    value = number(line, name)
    return math.nan if value is None else value


def kept(values: Sequence[float], buckets: int) -> Sequence[int]:
    """Indices of `values` to draw. A short curve is drawn whole. A long one is cut into
    equal buckets. Of each, the lowest, the highest and the first value that is not finite
    are kept."""
    if len(values) <= 2 * buckets:
        return range(len(values))
    found = {0, len(values) - 1}
    for bucket in range(buckets):
        start, stop = (len(values) * edge // buckets for edge in (bucket, bucket + 1))
        finite = [at for at in range(start, stop) if math.isfinite(values[at])]
        gaps = (at for at in range(start, stop) if not math.isfinite(values[at]))
        found |= {choose(finite, key=values.__getitem__) for choose in (min, max) if finite}
        found |= {at for at in (next(gaps, None),) if at is not None}
    return sorted(found)


def _points(shown: Columns, name: str, buckets: int) -> dict[str, list[Any]] | None:
    """A column over the steps, thinned. None if no line has a finite value."""
    values = shown.get(name, ())
    if not any(map(math.isfinite, values)):
        return None
    chosen = kept(values, buckets)
    return {name: [_short(column[at]) for at in chosen]
            for name, column in (("step", shown["step"]), ("y", values))}  # fmt: skip


def _short(value: float) -> float | None:
    """A number with six digits. None for one that is not finite, which JSON cannot state."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def charts(records: Sequence[RunRecord]) -> list[Chart]:
    """All charts, each with curves of one or several runs."""
    buckets = max(50, BUCKETS // len(records))
    shown = [columns(record.metrics) for record in records]
    others = dict.fromkeys(
        name for one in shown for name in one if name not in (*_KNOWN, *_IN_OTHERS)
    )
    found = [_chart(name, records, shown, buckets) for name in (*_KNOWN, *others)]
    return [chart for chart in found if chart is not None]


def _chart(
    name: str, records: Sequence[RunRecord], shown: Sequence[Columns], buckets: int
) -> Chart | None:
    """The chart of a metric of all runs, with companions and words. None if no run has it."""
    title, unit = _KNOWN.get(name, (name, ""))
    lines: list[dict[str, Any]] = [
        {"run": run, "label": "", **points}
        for run, one in enumerate(shown)
        if (points := _points(one, name, buckets)) is not None
    ]
    for run, (record, one) in enumerate(zip(records, shown, strict=True)):
        lines += [{"run": run, **line} for line in _beside(name, record, one, buckets)]
    if not lines:
        return None
    if any(len(one.get("step", ())) > 2 * buckets for one in shown):
        unit = f"{unit}{'; ' if unit else ''}thinned: lowest and highest of each range"
    drawn = [value for value in lines[0]["y"] if value is not None]
    said = "no finite value"
    if drawn:
        said = (
            f"from {drawn[0]:g} to {drawn[-1]:g}, lowest {min(drawn):g}, highest {max(drawn):g}"
        )
    return {"id": name, "title": title, "unit": unit, "lines": lines, "said": said}


def _beside(
    name: str, record: RunRecord, shown: Columns, buckets: int
) -> Iterator[Mapping[str, Any]]:
    """The curves shown with a metric: validation, a part of it, or the plan's prediction."""
    if name == "loss":
        evaluated = [one for one in record.events if one.get("kind") == "evaluation"]
        names = dict.fromkeys(key for event in evaluated for key in event)
        for column in ("loss", *(one for one in names if one.startswith(VALIDATION))):
            label = "validation" if column == "loss" else column
            if points := _evaluated(column, evaluated):
                yield {"label": label, "kind": "points", **points}
    if name == "step_time_s" and (part := _points(shown, "data_wait_s", buckets)):
        yield {"label": "waiting for data", "kind": "part", **part}
    promised = _promised(name, record.plan)
    if promised is not None and _points(shown, name, 1) is not None:
        basis = record.plan["predicted"]["basis"]
        label = "predicted, for a nominal CPU" if basis == "nominal" else "predicted"
        ends = [shown["step"][0], shown["step"][-1]]
        yield {"label": label, "kind": "predicted", "step": ends, "y": [_short(promised)] * 2}


def _promised(name: str, plan: Mapping[str, Any]) -> float | None:
    """The plan's prediction of a metric."""
    if not plan:
        return None
    if name in ("step_time_s", "memory_gib"):
        return number(plan["predicted"], name)
    if name == "mfu":
        return number(plan, "mfu")
    each = number(plan, "tokens_per_s_per_gpu")
    if name != "tokens_per_s" or each is None:
        return None
    layout: Mapping[str, int] = plan["layout"]
    return each * math.prod(layout[degree] for degree in ("dp", "tp", "pp", "cp"))


def _evaluated(name: str, evaluated: Sequence[Event]) -> dict[str, list[Any]]:
    """A column of validations, empty without any. The last counts if a step was evaluated
    twice."""
    found = {
        step: value
        for event in evaluated
        if (step := step_of(event)) is not None
        if (value := number(event, name)) is not None
    }
    steps = sorted(found)
    return {"step": steps, "y": [_short(found[step]) for step in steps]} if found else {}


def marks(record: RunRecord) -> list[dict[str, Any]]:
    """Marks where something happened to a run, in the order of its events. Steps that were done
    again are marked both times."""
    found = []
    for event in record.events:
        kind = str(event.get("kind"))
        if kind == "end" and number(event, "exit_code") == EXIT_DONE:
            continue  # as every run does
        step = number(event, "step" if "step" in event else "from_step")
        if kind in MARKS and step is not None:
            word, tone = MARKS[kind]
            time = str(event.get("time", ""))[:19].replace("T", " ")
            mark = {"word": word, "tone": tone, "step": step, "time": time}
            found.append({**mark, "what": _what(event)})
    return found


def _what(event: Event) -> str:
    """An event in words. If it has words of its own, these."""
    for name in ("why", "reason", "error", "signal", "message"):
        if event.get(name):
            return str(event[name])
    if event.get("kind") == "end":
        return f"rank {event.get('rank', 0)}, exit code {event.get('exit_code')}"
    if event.get("kind") == "resume":
        return f"{event.get('dropped_metrics_lines', 0)} logged steps are done again"
    own = {key: value for key, value in event.items() if key not in ("time", "kind", "step")}
    return ", ".join(f"{key} {value}" for key, value in own.items())
