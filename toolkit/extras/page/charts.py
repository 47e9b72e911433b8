"""The charts of the page: curves of one or several runs, and marks where something happened."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from toolkit.errors import EXIT_DONE
from toolkit.layout import Layout
from toolkit.report.attempts import Event, number, step_of
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

Curve = Mapping[int, float]
"""Values by step, in order. NaN where a value is not a number."""
Chart = dict[str, Any]


def curve(records: Iterable[Event], name: str) -> Curve:
    """A field of records over their steps. The last one counts if a step was done twice."""
    found = {
        step: value
        for one in records
        if (step := step_of(one)) is not None
        if (value := number(one, name)) is not None
    }
    return dict(sorted(found.items()))


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
        gaps = [at for at in range(start, stop) if not math.isfinite(values[at])]
        found |= {choose(finite, key=values.__getitem__) for choose in (min, max) if finite}
        found |= {*gaps[:1]}
    return sorted(found)


def _short(value: float) -> float | None:
    """A number with six digits. None for one that is not finite, which JSON cannot state."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def charts(records: Sequence[RunRecord]) -> list[Chart]:
    """All charts, each with curves of one or several runs."""
    buckets = max(50, BUCKETS // len(records))
    logged = dict.fromkeys(name for one in records for line in one.metrics for name in line)
    names = (*_KNOWN, *(name for name in logged if name not in (*_KNOWN, *_IN_OTHERS)))
    found = [_chart(name, records, buckets) for name in names]
    return [chart for chart in found if chart["lines"]]


def _chart(name: str, records: Sequence[RunRecord], buckets: int) -> Chart:
    """The chart of a metric of all runs, with companions and words."""
    title, unit = _KNOWN.get(name, (name, ""))
    lines: list[dict[str, Any]] = []
    is_thinned = False
    for run, record in enumerate(records):
        for label, kind, drawn in _curves(name, record):
            steps, values = [*drawn], [*drawn.values()]
            if not any(map(math.isfinite, values)):
                continue
            chosen = kept(values, buckets)
            is_thinned |= len(chosen) < len(values)
            points = {
                "step": [steps[at] for at in chosen],
                "y": [_short(values[at]) for at in chosen],
            }
            lines.append({"run": run, "label": label, "kind": kind, **points})
    if is_thinned:
        unit = f"{unit}{'; ' if unit else ''}thinned: lowest and highest of each range"
    first = [value for value in lines[0]["y"] if value is not None] if lines else [0.0]
    said = f"from {first[0]:g} to {first[-1]:g}, lowest {min(first):g}, highest {max(first):g}"
    return {"id": name, "title": title, "unit": unit, "lines": lines, "said": said}


def _curves(name: str, record: RunRecord) -> Iterator[tuple[str, str, Curve]]:
    """The curve of a metric, and those shown with it: validation, a part of it, or the plan's
    prediction. Each has a label and a kind."""
    logged = curve(record.metrics, name)
    yield "", "", logged
    if name == "loss":
        evaluated = [one for one in record.events if one.get("kind") == "evaluation"]
        yield "validation", "points", curve(evaluated, "loss")
        names = dict.fromkeys(key for event in evaluated for key in event)
        for source in (one for one in names if one.startswith(VALIDATION)):
            yield source, "points", curve(evaluated, source)
    if name == "step_time_s":
        yield "waiting for data", "part", curve(record.metrics, "data_wait_s")
    promised = _promised(name, record.plan)
    if promised is not None and logged:
        nominal = record.plan["predicted"]["basis"] == "nominal"
        label = "predicted, for a nominal CPU" if nominal else "predicted"
        yield label, "predicted", dict.fromkeys((min(logged), max(logged)), promised)


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
    return each * Layout.from_dict(plan["layout"]).world


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
    own = {key: value for key, value in event.items() if key not in ("time", "kind", "step")}
    return ", ".join(f"{key} {value}" for key, value in own.items())
