"""A plan's prediction next to what its run measured."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.plan.hardware.cluster import Basis
from toolkit.text.units import seconds, size


@dataclass(frozen=True)
class Prediction:
    """Memory and time of one step on the fullest and the busiest rank."""

    step_time_s: float
    memory_gib: float
    """Peak of what the framework's allocator hands out (torch.cuda.max_memory_allocated)."""
    basis: Basis
    """The basis of the step time."""
    reserved_gib: float
    """Peak of what the allocator takes from the device."""
    outside_gib: float
    """Memory of the device outside of the allocator: CUDA's context and NCCL's buffers."""


@dataclass(frozen=True)
class RunMeasurement:
    """What a run took since it started."""

    step_time_s: float
    """Median of its steps, without the first one where there are more."""
    steps: int
    """How many that are."""
    memory_gib: float | None = None
    """Peak of the allocator on the fullest device. None on CPU, where it is not measured."""
    process_gib: float | None = None
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
    predicted, measured = Prediction(**event["predicted"]), RunMeasurement(**event["measured"])
    yield "step time", _step(predicted, measured)
    promised = size(predicted.memory_gib)
    if measured.memory_gib is not None:
        off = _off(measured.memory_gib, predicted.memory_gib)
        yield "peak memory", f"{size(measured.memory_gib)} measured, {promised} predicted{off}"
        yield from _beyond(predicted, measured)
    elif measured.process_gib is not None:
        text = f"{size(measured.process_gib)} measured, with Python and its libraries"
        yield "peak memory", f"{text} (predicted without them: {promised})"


def _beyond(predicted: Prediction, measured: RunMeasurement) -> Iterator[tuple[str, str]]:
    """Reserved memory, and memory outside of the allocator: measured and predicted."""
    for key, name in (("reserved_gib", "reserved"), ("outside_gib", "CUDA and NCCL")):
        if (found := getattr(measured, key)) is not None:
            yield name, f"{size(found)} measured, {size(getattr(predicted, key))} predicted"
    if retries := measured.retries:
        yield "allocator", f"the device was full {retries} times: its cache was released"


def _step(predicted: Prediction, measured: RunMeasurement) -> str:
    found, promised = measured.step_time_s, predicted.step_time_s
    if predicted.basis == "nominal":
        return f"{seconds(found)} measured (`dmt doctor --calibrate` lets DMT predict it)"
    text = f"{seconds(found)} measured, {seconds(promised)} predicted"
    source = {"calibrated": "measured speeds", "data sheet": "data sheets"}
    return f"{text} from {source[predicted.basis]}{_off(found, promised)}"


def _off(measured: float, predicted: float) -> str:
    ratio = _ratio(measured, predicted)
    return "" if ratio is None else f" ({ratio - 1:+.0%})"
