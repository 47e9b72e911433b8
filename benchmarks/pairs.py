"""Alternating pairs of runs, `dmt launch` and another loop: what overhead.py and
against_trainer.py have in common.

Runs alternate (dmt, other, dmt, other, …), so that a machine that gets slower or faster
does so for both; quoted is the median of the ratios within each pair. A run's step time is
the median over windows of LOGGED_EVERY steps, each with one logged step, of the mean time
from the end of a step to the end of the next: logging counts.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RECIPE = Path("recipes/tiny/llama-bytes.yaml")
WARM_UP_STEPS = 20
LOGGED_EVERY = 10


@dataclass
class Timing:
    """One run: seconds per step, and from its start to its first step."""

    step_s: float
    first_s: float


@dataclass
class Pairs:
    """The runs of one comparison so far."""

    other: str
    """What DMT is compared with: `bare` or `trainer`."""
    ours: list[Timing] = field(default_factory=list)
    theirs: list[Timing] = field(default_factory=list)

    def run(self, dmt: Callable[[], Timing], other: Callable[[], Timing]) -> None:
        """One more pair."""
        ours, theirs = dmt(), other()
        self.ours.append(ours)
        self.theirs.append(theirs)
        print(
            f"pair {len(self.ours)}: step {ours.step_s * 1e3:.1f} ms dmt, "
            f"{theirs.step_s * 1e3:.1f} ms {self.other}, "
            f"tokens/s ratio {self.ratios[-1]:.3f}; first step after {ours.first_s:.1f} s dmt, "
            f"{theirs.first_s:.1f} s {self.other}",
            flush=True,
        )

    @property
    def ratios(self) -> list[float]:
        """DMT's tokens per second over the other's, pair by pair."""
        return [b.step_s / a.step_s for a, b in zip(self.ours, self.theirs, strict=True)]

    def result(self) -> dict[str, Any]:
        """Ratios and medians, ready for JSON."""
        sides = {"dmt": self.ours, self.other: self.theirs}
        return {
            f"tokens_per_s_ratio_dmt_to_{self.other}": {
                "median": round(statistics.median(self.ratios), 4),
                "pairs": [round(ratio, 4) for ratio in self.ratios],
            },
            "milliseconds_per_step": {
                name: round(1e3 * statistics.median(run.step_s for run in runs), 2)
                for name, runs in sides.items()
            },
            "seconds_to_first_step": {
                name: round(statistics.median(run.first_s for run in runs), 2)
                for name, runs in sides.items()
            },
        }


def parser(description: str, steps: int) -> argparse.ArgumentParser:
    """The options that both benchmarks have."""
    made = argparse.ArgumentParser(description=description.split("\n\n")[0])
    made.add_argument("--pairs", type=int, default=7)
    made.add_argument("--steps", type=int, default=steps)
    made.add_argument("--out", type=Path)
    return made


def dmt(folder: Path, overrides: Sequence[str], steps: int) -> Timing:
    """`dmt launch` of the recipe, in the run directory `folder/dmt`."""
    run_dir = folder / "dmt"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [
        *overrides, f"training.steps={steps}", f"logging.every_steps={LOGGED_EVERY}",
        "logging.wandb=null", "evaluation.every_steps=null", "checkpoint.every_steps=null",
        "checkpoint.export=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "toolkit.cli.main", "launch", str(RECIPE)]
    command += ["--run-dir", str(run_dir), *(f"--set={text}" for text in overrides)]
    first_s = _run(command, run_dir / "metrics.jsonl")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    logged = [(line["step"], line["step_time_s"]) for line in map(json.loads, lines)]
    return Timing(statistics.median(s for step, s in logged if step > WARM_UP_STEPS), first_s)


def loop(folder: Path, script: str, steps: int) -> Timing:
    """A loop of its own, `benchmarks/SCRIPT RUN_DIR STEPS OUT`, in two processes under
    torchrun. RUN_DIR is that of the last `dmt`; the loop is to leave each step's time in OUT.
    """
    out = folder / "loop.json"
    out.with_suffix(".first").unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", f"benchmarks/{script}"]
    first_s = _run(
        [*command, str(folder / "dmt"), str(steps), str(out)], out.with_suffix(".first")
    )
    times = json.loads(out.read_text())["step_times_s"]
    windows = range(WARM_UP_STEPS, steps - LOGGED_EVERY + 1, LOGGED_EVERY)
    means = [statistics.mean(times[first : first + LOGGED_EVERY]) for first in windows]
    return Timing(statistics.median(means), first_s)


def _run(command: list[str], first_step: Path) -> float:
    """Run a command; seconds until `first_step` appears."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        while process.poll() is None and not first_step.exists():
            time.sleep(0.01)
        first_s = time.perf_counter() - started
        if process.wait():
            output.seek(0)
            sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n"
                     + output.read()[-2000:].decode(errors="replace"))  # fmt: skip
    return first_s


def report(result: dict[str, Any], packages: Sequence[str], out: Path | None) -> None:
    """Print a result together with the machine and the versions, and write it where asked."""
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "recipe": str(RECIPE),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in packages},
    }
    text = json.dumps(facts | result, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
