"""Cost of DMT against a hand-written loop of the same engine: tokens/s and time to the
first step.

    python benchmarks/overhead.py [--engine deepspeed | megatron] [--pairs 5] [--steps 120]
        [--out benchmarks/results/…json]

Runs alternate (dmt, bare, dmt, bare, …), so that a machine that gets slower or faster
does so for both; quoted is the median of the ratios within each pair.
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
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

RECIPE = Path("recipes/tiny/llama-bytes.yaml")
WARM_UP_STEPS = 20
ENGINES = {
    "deepspeed": [],
    "megatron": [
        "parallel.engine=megatron", "parallel.zero.stage=auto", "parallel.tensor=2",
        "parallel.sequence=false",
    ],
}  # fmt: skip
"""What each engine changes in the recipe; its bare loop is bare_ENGINE.py."""
PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron-core"}


def run(command: list[str], first_step: Path) -> tuple[float, float]:
    """Run a command; seconds until `first_step` appears and in total."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    first = float("nan")
    while process.poll() is None:
        if first_step.exists() and first != first:
            first = time.perf_counter() - started
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return first, time.perf_counter() - started


def dmt(folder: Path, engine: str, steps: int) -> tuple[float, float]:
    """Seconds per step (median) and to the first step of `dmt launch`."""
    run_dir = folder / "dmt"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [
        *ENGINES[engine],
        f"training.steps={steps}", "logging.every_steps=1", "logging.wandb=null",
        "evaluation.every_steps=null", "checkpoint.every_steps=null", "checkpoint.export=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "toolkit.cli.main", "launch", str(RECIPE)]
    command += ["--run-dir", str(run_dir), *(f"--set={text}" for text in overrides)]
    first, _ = run(command, run_dir / "metrics.jsonl")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["step_time_s"] for line in lines]
    return statistics.median(times[WARM_UP_STEPS:]), first


def bare(folder: Path, engine: str, steps: int) -> tuple[float, float]:
    """The same for the hand-written loop under torchrun."""
    out = folder / "bare.json"
    out.with_suffix(".first").unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", f"benchmarks/bare_{engine}.py"]
    first, _ = run(
        [*command, str(folder / "dmt"), str(steps), str(out)], out.with_suffix(".first")
    )
    times = json.loads(out.read_text())["step_times_s"]
    return statistics.median(times[WARM_UP_STEPS:]), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--engine", choices=ENGINES, default="deepspeed")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ratios, starts = [], []
    with tempfile.TemporaryDirectory() as name:
        for pair in range(options.pairs):
            ours, our_start = dmt(Path(name), options.engine, options.steps)
            theirs, their_start = bare(Path(name), options.engine, options.steps)
            ratios.append(theirs / ours)
            starts.append((our_start, their_start))
            print(
                f"pair {pair + 1}: step {ours * 1e3:.1f} ms dmt, {theirs * 1e3:.1f} ms bare, "
                f"tokens/s ratio {ratios[-1]:.3f}; first step after {our_start:.1f} s dmt, "
                f"{their_start:.1f} s bare",
                flush=True,
            )
    packages = ("torch", "transformers", PACKAGES[options.engine])
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "recipe": str(RECIPE),
        "engine": options.engine,
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in packages},
        "tokens_per_s_ratio_dmt_to_bare": {
            "median": round(statistics.median(ratios), 4),
            "pairs": [round(ratio, 4) for ratio in ratios],
        },
        "seconds_to_first_step": {
            "dmt": round(statistics.median(start for start, _ in starts), 2),
            "bare": round(statistics.median(start for _, start in starts), 2),
        },
    }
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
