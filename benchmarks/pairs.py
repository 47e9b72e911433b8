"""Pairs of runs that take turns, `dmt launch` and another loop: what overhead.py and
against_trainer.py have in common.

Both runs of a pair exist at once, and only one of them runs: every second all processes of
one are stopped (SIGSTOP) and those of the other go on. A shared machine whose speed changes
from minute to minute by a tenth does so for both. A run's step time is the time in which it
ran, from the end of its first step to the end of its last, over the steps between: logging
counts. Quoted is the median of the ratios within each pair: two runs of the same loop differ
by up to 3%, by where their memory happens to lie. Processor time, user and system, is that of
all processes of a run between the same two steps; other load on the machine hardly changes it.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import psutil

RECIPE = Path("recipes/tiny/llama-bytes.yaml")
LOGGED_EVERY = 10
TURN_S = 1.0
POLL_S = 0.01


class Run:
    """A run that has done its first step and waits for its turn."""

    def __init__(
        self, command: Sequence[str], first: Callable[[], bool], last: Callable[[], bool]
    ) -> None:
        """Start it; `first` and `last` tell whether that step is done."""
        self.command, self._last = command, last
        self.ran_s = 0.0
        """Since its first step."""
        self.cpu_s = 0.0
        """Of all its processes, from its first step to its last turn."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        started = time.perf_counter()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the run ends
        self._process = subprocess.Popen(
            command, env=environment, stdout=self._output, stderr=self._output
        )
        try:
            while not first():
                if self._process.poll() is not None:
                    self.end()
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            self.close()
            raise
        self.first_s = time.perf_counter() - started
        self.signal(signal.SIGSTOP)
        self._cpu_before_s = _cpu_s(self._processes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs, and what is stopped."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def turn(self, limit_s: float = TURN_S) -> bool:
        """Let it run for so long, or to its last step; whether that is done."""
        started = time.perf_counter()
        self.signal(signal.SIGCONT)
        while not (done := self._last()) and time.perf_counter() - started < limit_s:
            if self._process.poll() is not None:
                self.end()
            time.sleep(POLL_S)
        self.ran_s += time.perf_counter() - started
        self.signal(signal.SIGSTOP)
        if processes := self._processes():
            self.cpu_s = _cpu_s(processes) - self._cpu_before_s
        return done

    def end(self) -> None:
        """Let it end. Stops the benchmark with its output when it failed."""
        self.signal(signal.SIGCONT)
        code = self._process.wait()
        self._output.seek(0)
        text = self._output.read()[-2000:].decode(errors="replace")
        if code or not self._last():
            sys.exit(f"{' '.join(self.command)} ended with {code}:\n{text}")

    def signal(self, number: signal.Signals) -> None:
        """Send it to all processes of the run."""
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):  # ended since it was listed
                process.send_signal(number)

    def _processes(self) -> list[psutil.Process]:
        """Those that still run, the leader last."""
        if self._process.poll() is not None:
            return []
        leader = psutil.Process(self._process.pid)
        return [*leader.children(recursive=True), leader]


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Processor time of stopped processes and of their children that have ended."""
    return sum(
        times.user + times.system + times.children_user + times.children_system
        for times in (process.cpu_times() for process in processes)
    )


@dataclass
class Pairs:
    """The runs of one comparison so far."""

    other: str
    """What DMT is compared with: `bare` or `trainer`."""
    steps: int
    ours: list[Run] = field(default_factory=list)
    theirs: list[Run] = field(default_factory=list)

    def run(self, overrides: Sequence[str], script: str) -> None:
        """One more pair: `dmt launch` of the tiny recipe, and `benchmarks/SCRIPT`."""
        with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
            ours = ends.enter_context(dmt(Path(name), RECIPE, overrides, self.steps))
            theirs = ends.enter_context(loop(Path(name), script, self.steps))
            running = [ours, theirs]
            while running:
                running = [run for run in running if not run.turn()]
            for run in (ours, theirs):
                run.end()
        self.ours.append(ours)
        self.theirs.append(theirs)
        print(
            f"pair {len(self.ours)}: step {self._step_s(ours) * 1e3:.1f} ms dmt, "
            f"{self._step_s(theirs) * 1e3:.1f} ms {self.other}, "
            f"tokens/s ratio {self.ratios[-1]:.3f}; "
            f"processor time {self._cpu_ms(ours):.1f} ms dmt, "
            f"{self._cpu_ms(theirs):.1f} ms {self.other}, "
            f"ratio {self.cpu_ratios[-1]:.3f}; first step after {ours.first_s:.1f} s dmt, "
            f"{theirs.first_s:.1f} s {self.other}",
            flush=True,
        )

    def _step_s(self, run: Run) -> float:
        return run.ran_s / (self.steps - 1)

    def _cpu_ms(self, run: Run) -> float:
        return 1e3 * run.cpu_s / (self.steps - 1)

    @property
    def cpu_ratios(self) -> list[float]:
        """DMT's processor time over the other's, pair by pair."""
        return [a.cpu_s / b.cpu_s for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratios(self) -> list[float]:
        """DMT's tokens per second over the other's, pair by pair."""
        return [b.ran_s / a.ran_s for a, b in zip(self.ours, self.theirs, strict=True)]

    def result(self) -> dict[str, Any]:
        """Ratios and medians, ready for JSON."""
        sides = {"dmt": self.ours, self.other: self.theirs}
        return {
            f"tokens_per_s_ratio_dmt_to_{self.other}": median_and_all(self.ratios),
            "milliseconds_per_step": {
                name: round(1e3 * statistics.median(self._step_s(run) for run in runs), 2)
                for name, runs in sides.items()
            },
            f"processor_time_ratio_dmt_to_{self.other}": median_and_all(self.cpu_ratios),
            "processor_milliseconds_per_step": {
                name: round(statistics.median(self._cpu_ms(run) for run in runs), 2)
                for name, runs in sides.items()
            },
            "seconds_to_first_step": {
                name: round(statistics.median(run.first_s for run in runs), 2)
                for name, runs in sides.items()
            },
        }


def median_and_all(ratios: Sequence[float]) -> dict[str, Any]:
    """Their median, and each."""
    return {
        "median": round(statistics.median(ratios), 4),
        "pairs": [round(ratio, 4) for ratio in ratios],
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both benchmarks have."""
    made = argparse.ArgumentParser(description=description.split("\n\n")[0])
    made.add_argument("--pairs", type=int, default=7)
    made.add_argument("--steps", type=int, default=150)
    made.add_argument("--out", type=Path)
    return made


def dmt(
    folder: Path,
    recipe: Path,
    overrides: Sequence[str],
    steps: int,
    logged_every: int = LOGGED_EVERY,
) -> Run:
    """`dmt launch` of `recipe`, in the run directory `folder/dmt`."""
    run_dir = folder / "dmt"
    shutil.rmtree(run_dir, ignore_errors=True)
    overrides = [
        *overrides, f"training.steps={steps}", f"logging.every_steps={logged_every}",
        "logging.trackers=[]", "evaluation.every_steps=null", "checkpoint.every_steps=null",
        "checkpoint.export=false",
    ]  # fmt: skip
    command = [sys.executable, "-m", "toolkit.cli.main", "launch", str(recipe)]
    command += ["--run-dir", str(run_dir), *(f"--set={text}" for text in overrides)]
    metrics = run_dir / "metrics.jsonl"

    def logged(lines: int) -> bool:
        return metrics.exists() and metrics.read_bytes().count(b"\n") >= lines

    assert steps % logged_every == 0, "the last step is logged"
    return Run(command, lambda: logged(1), lambda: logged(1 + steps // logged_every))


def loop(folder: Path, script: str, steps: int, processes: int = 2) -> Run:
    """A loop of its own, `benchmarks/SCRIPT RUN_DIR STEPS DONE`, under torchrun. RUN_DIR is
    that of the last `dmt` in `folder`; rank 0 is to make the files DONE.first and DONE.last
    after those steps.
    """
    done = folder / "loop"
    for mark in (".first", ".last"):
        done.with_suffix(mark).unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", f"benchmarks/{script}"]
    command += [str(folder / "dmt"), str(steps), str(done)]
    return Run(command, done.with_suffix(".first").exists, done.with_suffix(".last").exists)


def report(
    result: dict[str, Any], packages: Sequence[str], out: Path | None, recipe: Path = RECIPE
) -> None:
    """Print a result together with the machine and the versions, and write it where asked."""
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "recipe": str(recipe),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in packages},
    }
    text = json.dumps(facts | result, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
