"""Event logs as a test writes them: times are seconds after noon."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>@SCRIPT@\u202e"
"""A name that a page must show and not carry out."""
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def event(second: float, kind: str, **fields: Any) -> dict[str, Any]:
    time = (NOON + timedelta(seconds=second)).isoformat(timespec="milliseconds")
    return {"time": time, "kind": kind, **fields}


def metrics(
    steps: int, each_s: float, every: int = 1, tokens: int = 100
) -> list[dict[str, Any]]:
    """Logged after the first step and every `every` steps, as the observer does."""
    return [
        {
            "step": step,
            "loss": 5.0 - step / 100,
            "step_time_s": each_s,
            "consumed_tokens": step * tokens,
        }
        for step in range(1, steps + 1)
        if step == 1 or step % every == 0
    ]


KILLED_AND_RESTARTED = [
    event(0, "launch"),
    event(10, "start", step=0, world=2, engine="ddp"),
    event(35, "save", step=10, seconds=3.0, stall_s=0.5, folder="step-00000010"),
    # 10 … 14 are done, then rank 1 is killed; the launcher notices at 50.
    event(50, "restart", attempt=1, reason="rank 1 was killed by SIGKILL"),
    event(58, "load", step=10, seconds=2.0),
    event(60, "start", step=10, world=2, engine="ddp"),
    event(60, "resume", step=10, dropped_metrics_lines=4),
    event(68, "replay", from_step=10, to_step=14, seconds=8.0),
    event(71, "skip", step=15, why="loss is not finite"),
    event(82, "evaluation", step=20, loss=4.5, seconds=1.0),
    event(84, "save", step=20, seconds=2.0, stall_s=0.3),
    event(85, "end", rank=0, step=20, exit_code=0),
]
"""20 steps of 2 s, one kill, every event that there is."""


def write_run(
    folder: Path, events: Sequence[Mapping[str, Any]], lines: Iterable[Mapping[str, Any]]
) -> Path:
    """A run directory with these logs, and empty files of everything else."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in {"events": events, "metrics": lines}.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(text)
    for name in ("recipe.yaml", "plan.json", "environment.json", "command.txt"):
        (folder / name).write_text("{}")
    return folder
