"""`metrics.jsonl`: one object per logged step, each step once, also after a resume."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.run import jsonl
from toolkit.run.events import EventLog


@dataclass(frozen=True)
class Metrics:
    """One line of `metrics.jsonl`. NaN and infinity are written as strings (see jsonl)."""

    step: int
    """Optimizer steps done, counting this one: the first step's line says 1."""
    loss: float
    """Loss of the global batch, as the objective defines it. `pretrain`: mean cross entropy
    (nats) over its unmasked tokens."""
    grad_norm: float
    """Global L2 norm of the gradients before clipping."""
    lr: float
    """Learning rate of this step."""
    tokens: int
    """Unmasked tokens of this step's global batch."""
    tokens_per_s: float
    """Tokens per second over all ranks since the last line."""
    step_time_s: float
    """Mean seconds per step since the last line."""
    data_wait_s: float
    """Mean seconds per step since the last line in which rank 0 waited for micro batches. Part
    of `step_time_s`."""
    mfu: float | None
    """Model FLOPs utilisation, 0 … 1. Null when the device's peak is unknown."""
    consumed_samples: int
    """Sequences consumed since step 0: the data cursor."""
    consumed_tokens: int | None
    """Sum of `tokens` over every step since step 0, logged or not, skipped or not. The same in
    every layout. Null in a run that continues from a checkpoint that does not state it."""
    skipped: bool
    """True when the update was skipped. events.jsonl says why."""
    memory_gib: float | None
    """Peak device memory of the fullest rank. Null on CPU."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The objective's metrics, written next to the others under their own names."""

    def record(self) -> dict[str, Any]:
        """The line: DMT's own names first, which take precedence."""
        own = asdict(self)
        return own | {name: v for name, v in own.pop("metrics").items() if name not in own}


class MetricsLog:
    """Appends to `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def resume(cls, path: Path, step: int, events: EventLog) -> "MetricsLog":
        """Continue after `step` (0: from the start).

        A run that was stopped after its last checkpoint leaves lines of later steps. They and a
        partial last line are dropped, because these steps are repeated. An event `resume`
        records `step`, also if it is 0. An event `replay` records the steps to repeat and how
        long they took.
        """
        dropped = jsonl.drop_later_steps(path, step)
        if step > 0 or dropped:
            events.write("resume", step=step, dropped_metrics_lines=len(dropped))
        times = [t for line in dropped if isinstance(t := line.get("step_time_s"), float)]
        if times and isinstance(last := dropped[-1].get("step"), int):
            seconds = round((last - step) * statistics.mean(times), 3)
            events.write("replay", from_step=step, to_step=last, seconds=seconds)
        return cls(path)

    def write(self, metrics: Metrics) -> None:
        """Append one line. It is in the file when this returns, if there was room for it."""
        jsonl.append_where_room(self.path, metrics.record())


def mfu(
    flops_per_token: float,
    tokens_per_s: float,
    peak_flops_per_gpu: float | None,
    world: int,
) -> float | None:
    """Return model FLOPs utilisation: needed FLOPs per second over peak FLOPs per second.

    `flops_per_token` counts forward and backward once, recompute not. `tokens_per_s` is
    the sum over all `world` devices. Source: arXiv:2204.02311 (PaLM), appendix B. None
    when the device's peak is unknown, as it is for CPUs.
    """
    if peak_flops_per_gpu is None:
        return None
    return flops_per_token * tokens_per_s / (peak_flops_per_gpu * world)
