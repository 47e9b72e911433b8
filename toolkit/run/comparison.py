"""A plan's prediction next to what its run measured."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.hardware.cluster import Basis
from toolkit.text.units import seconds, size


@dataclass(frozen=True)
class Prediction:
    """Memory and time of one step on the fullest and the busiest rank."""

    step_time_s: float
    memory_gib: float
    """Peak of what the framework's allocator hands out (torch.cuda.max_memory_allocated)."""
    basis: Basis
    """The basis of the step time."""
    reserved_gib: float | None = None
    """Peak of what the allocator takes from the device; None in a plan of an older release."""
    outside_gib: float | None = None
    """Memory of the device outside of the allocator: CUDA's context and NCCL's buffers."""


@dataclass(frozen=True)
class RunMeasurement:
    """What a run took since it started."""

    step_time_s: float
    """Median of its steps, without the first one where there are more."""
    steps: int
    """How many that are."""
    memory_gib: float | None
    """Peak of the allocator on the fullest device; None on CPU, where it is not measured."""
    process_gib: float | None
    """On CPU: peak of the largest process as a whole, Python and its libraries included."""
    reserved_gib: float | None = None
    """Peak of what the allocator took from the fullest device."""
    outside_gib: float | None = None
    """Memory of that device outside of the allocator, other processes' included."""
    retries: int | None = None
    """How often the allocator released its cache because the device was full: each costs time,
    and the next step may not fit."""


def event_fields(predicted: Prediction, measured: RunMeasurement) -> dict[str, Any]:
    """The `prediction` event: both sides, and measured over predicted where that says
    something: a nominal CPU is no real machine."""
    step_time_s = None if predicted.basis == "nominal" else predicted.step_time_s
    return {
        "predicted": asdict(predicted),
        "measured": asdict(measured),
        "measured_over_predicted": {
            "step_time": _ratio(measured.step_time_s, step_time_s),
            "memory": _ratio(measured.memory_gib, predicted.memory_gib),
        },
    }


def _ratio(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted if measured is not None and predicted else None


def summary_numbers(event: Mapping[str, Any]) -> dict[str, Any]:
    """A `prediction` event as flat names for a tracker: `predicted/step_time_s`, …"""
    sides = ("predicted", "measured", "measured_over_predicted")
    return {
        f"{side}/{key}": value
        for side in sides
        for key, value in event.get(side, {}).items()
        if value is not None
    }


def differences(event: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Rows of (quantity, text) for people."""
    predicted, measured = event["predicted"], event["measured"]
    ratios = event["measured_over_predicted"]
    yield "step time", _step(predicted, measured, ratios["step_time"])
    if measured["memory_gib"] is not None:
        text = f"{size(measured['memory_gib'])} measured, "
        text += f"{size(predicted['memory_gib'])} predicted{_off(ratios['memory'])}"
        yield "peak memory", text
        yield from _beyond(predicted, measured)
    elif measured["process_gib"] is not None:
        text = f"{size(measured['process_gib'])} measured with all libraries, "
        text += f"{size(predicted['memory_gib'])} predicted for the training alone"
        yield "peak memory", text


def _beyond(
    predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """What the allocator holds beyond that, and what is outside of it, which runs out first."""
    for key, name in (("reserved_gib", "reserved"), ("outside_gib", "CUDA and NCCL")):
        if measured.get(key) is not None:
            promised = predicted.get(key)
            more = "" if promised is None else f", {size(promised)} predicted"
            yield name, f"{size(measured[key])} measured{more}"
    if retries := measured.get("retries"):
        yield "allocator", f"the device was full {retries} times: its cache was released"


def _step(
    predicted: Mapping[str, Any], measured: Mapping[str, Any], ratio: float | None
) -> str:
    found, promised = seconds(measured["step_time_s"]), predicted["step_time_s"]
    text = f"{found} measured, {seconds(promised)} predicted"
    if predicted["basis"] == "nominal":
        return f"{text} for a nominal CPU, not for this one (see `dmt doctor --calibrate`)"
    source = {"calibrated": "measured speeds", "data sheet": "data sheets"}
    return f"{text} from {source[predicted['basis']]}{_off(ratio)}"


def _off(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio - 1:+.0%})"
