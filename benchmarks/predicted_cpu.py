"""Predicted against measured step time of small runs on this machine's processor.

    python benchmarks/predicted_cpu.py [--steps 15] [--rounds 3] [--out RESULT.json]

Before every run, `dmt doctor --calibrate` measures the machine with the run's number of
processes: what else the machine does meanwhile changes from minute to minute. Each process
has one thread: two that wait for each other on a busy machine take many times as long. The
prediction is the plan's own (the run's `prediction` event); quoted is the median over the
rounds.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECIPE = Path("recipes/tiny/llama-bytes.yaml")
QUIET = (
    "logging.wandb=null", "evaluation.every_steps=null", "evaluation.batches=1",
    "checkpoint.every_steps=null", "checkpoint.export=false", "schedule.warmup_steps=0",
)  # fmt: skip
WIDE = (
    "model.config.hidden_size=256", "model.config.intermediate_size=768",
    "training.sequence_length=256", "training.global_batch_size=8",
)  # fmt: skip
"""Four times the parameters of a layer, longer sequences."""
MEGATRON = ("parallel.engine=megatron", "parallel.zero.stage=auto", "parallel.sequence=false")
RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tiny, ddp, 1 process": (1, ("parallel.engine=ddp",)),
    "tiny, ZeRO-2, 2 processes": (2, ("parallel.zero.stage=2",)),
    "wide, ddp, 2 processes": (2, (*WIDE, "parallel.engine=ddp")),
    "wide, ZeRO-3, 2 processes": (2, (*WIDE, "parallel.zero.stage=3")),
    "wide, tensor 2": (2, (*WIDE, *MEGATRON, "parallel.tensor=2", "parallel.pipeline=1")),
    "wide, pipeline 2": (2, (*WIDE, *MEGATRON, "parallel.tensor=1", "parallel.pipeline=2")),
}  # fmt: skip
"""Number of processes and settings."""
MICRO_BATCH = "training.micro_batch_size=2"


def dmt(*arguments: str) -> None:
    """Run a command of the toolkit, its output only where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "toolkit.cli.main", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(
            f"dmt {' '.join(arguments)} ended with {done.returncode}\n{done.stderr[-2000:]}"
        )


def run(folder: Path, processes: int, settings: Sequence[str], steps: int) -> dict[str, Any]:
    """Calibrate, train, and return the run's `prediction` event."""
    cluster, run_dir = folder / "cluster.yaml", folder / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    dmt("doctor", "--calibrate", "--processes", str(processes), "--out", str(cluster))
    overrides = (*QUIET, f"training.steps={steps}", MICRO_BATCH, *settings)
    dmt(
        "launch", str(RECIPE), "--cluster", str(cluster), "--run-dir", str(run_dir),
        *(f"--set={text}" for text in overrides),
    )  # fmt: skip
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return next(event for event in events if event["kind"] == "prediction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for title, (processes, settings) in RUNS.items():
            if options.only not in title:
                continue
            found = [
                run(Path(name), processes, settings, options.steps)
                for _ in range(options.rounds)
            ]
            rows.append(row(title, found))
            print(
                f"{title:<34} predicted {rows[-1]['predicted_s'] * 1e3:7.1f} ms, measured "
                f"{rows[-1]['measured_s'] * 1e3:7.1f} ms, ratio "
                f"{rows[-1]['predicted_over_measured']:.2f}",
                flush=True,
            )
    errors = [abs(one["predicted_over_measured"] - 1) for one in rows]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "recipe": str(RECIPE),
        "steps": options.steps,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "megatron-core")},
        "mean_absolute_error": round(statistics.mean(errors), 3),
        "runs": rows,
    }
    print(f"mean absolute error {result['mean_absolute_error']:.0%}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


def row(title: str, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rounds of one run, and the median of predicted over measured."""
    predicted = [event["predicted"]["step_time_s"] for event in events]
    measured = [event["measured"]["step_time_s"] for event in events]
    ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
    return {
        "run": title,
        "predicted_s": round(statistics.median(predicted), 5),
        "measured_s": round(statistics.median(measured), 5),
        "predicted_over_measured": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
    }


if __name__ == "__main__":
    main()
