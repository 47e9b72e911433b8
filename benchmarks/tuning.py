"""`dmt tune --throughput` against an exhaustive run, on two processes of one processor.

    python benchmarks/tuning.py FOLDER [--trials 7] [--steps 10] [--out RESULT.json]

The tuning is killed once (SIGKILL, in its third trial) and started again. The exhaustive run
measures every layout that fits for as many steps and gives none up. Each finds its layout by
its own measurements. If these differ, the two layouts are then measured in turn, because other
work on the machine changes its speed from minute to minute, and `slower` compares their fastest
rounds. What was measured is kept in FOLDER: the same command continues a run that was killed.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Any

from toolkit.extras.tune.candidates import key_of
from toolkit.extras.tune.throughput import Measurement, Tuning, fastest, measure, searched
from toolkit.extras.tune.trial import WARM_UP_STEPS, device_slices, run_trial
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe

RECIPE = Path("recipes/tiny/llama-bytes.yaml")
SETTINGS = (
    "parallel.engine=auto", "training.global_batch_size=2", "training.sequence_length=256",
)  # fmt: skip
ROUNDS = 3
"""How often the two layouts are measured against each other, in turn."""
KILLED_IN = 2
"""The trial in which the tuning is killed, counted from 0."""


def tuning_command(folder: Path, trials: int, steps: int) -> list[str]:
    stated = [word for one in SETTINGS for word in ("--set", one)]
    limits = ["--trials", str(trials), "--steps", str(steps), "--hang-seconds", "60"]
    files = ["--dir", str(folder), "--out", str(folder / "tuned.yaml")]
    verb = [sys.executable, "-m", "toolkit.cli.main", "tune", str(RECIPE), "--throughput"]
    return [*verb, *stated, *limits, *files]


def tune(folder: Path, trials: int, steps: int) -> None:
    """Run the verb to its end, killed once on the way."""
    command, killed = tuning_command(folder, trials, steps), folder / "killed"
    process = subprocess.Popen(command)
    victim = folder / "trials" / f"{KILLED_IN:04d}" / "metrics.jsonl"
    while process.poll() is None:
        if victim.exists() and not killed.exists():
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed.touch()
            process = subprocess.Popen(command)
        time.sleep(0.2)
    if process.returncode:
        sys.exit(f"the tuning ended with {process.returncode}")


def every_layout(folder: Path, machine: Path, steps: int) -> Tuning:
    """All that fit, in the order of their predicted times."""
    loaded = load_recipe(RECIPE, SETTINGS, str(machine))
    recipe, search = searched(loaded, find_cluster(str(machine)))
    options = ("--cluster", str(machine))
    count = len(search.fitting)
    return Tuning(RECIPE, SETTINGS, recipe, search, folder, count, steps, 60, options, inf)


def results(folder: Path) -> list[Measurement]:
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [Measurement(**json.loads(line)) for line in lines]


def spent_s(measured: list[Measurement]) -> float:
    return sum(one.seconds for one in measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    own, every = chosen.folder / "tuned", chosen.folder / "every"
    own.mkdir(parents=True, exist_ok=True)
    tune(own, chosen.trials, chosen.steps)
    for result in measure(every_layout(every, own / "machine.yaml", chosen.steps)):
        print(f"{result.number}: {result.layout}: {result.ending} {result.step_time_s}")
    best, optimum = fastest(results(own)), fastest(results(every))
    assert best is not None and optimum is not None, "something ran"
    tuning = every_layout(every, own / "machine.yaml", chosen.steps)
    rounds = {} if best.layout == optimum.layout else in_turn(tuning, [best, optimum])
    found: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("torch", "deepspeed", "megatron-core")},
        "settings": SETTINGS,
        **compared(results(own), results(every)),
        "in_turn_s": rounds,
        "slower": slower(best, optimum, rounds),
    }
    text = json.dumps(found, indent=1)
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n", encoding="utf-8")


def in_turn(tuning: Tuning, both: list[Measurement]) -> dict[str, list[float]]:
    """Seconds per step of both layouts in every round."""
    rounds: dict[str, list[float]] = {one.layout: [] for one in both}
    enough = WARM_UP_STEPS + tuning.steps
    for number in range(ROUNDS * len(both)):
        one = both[number % len(both)]
        candidate = tuning.candidates.by_key[key_of(one.settings)]
        result = run_trial(
            tuning.path,
            tuning.settings(candidate),
            tuning.folder / "in-turn" / str(number),
            device_slices(tuning.recipe.cluster)[0],
            lambda followed: len(followed.metrics) >= enough,
            options=tuning.options,
        )
        assert result.step_time_s is not None, result
        rounds[one.layout].append(result.step_time_s)
    return rounds


def slower(best: Measurement, optimum: Measurement, rounds: dict[str, list[float]]) -> float:
    """By how much the tuning's layout is slower than the exhaustive run's."""
    if not rounds:
        return 0.0
    return round(min(rounds[best.layout]) / min(rounds[optimum.layout]) - 1, 4)


def compared(tuned: list[Measurement], every: list[Measurement]) -> dict[str, Any]:
    """The tuning next to the exhaustive run."""
    best, optimum = fastest(tuned), fastest(every)
    assert best is not None and optimum is not None, "something ran"
    in_tuning = {one.layout: one.step_time_s for one in tuned}
    return {
        "layouts": len(every),
        "tuned": {"trials": len(tuned), "seconds": spent_s(tuned), "layout": best.layout},
        "exhaustive": {"seconds": spent_s(every), "layout": optimum.layout},
        "share_of_time": round(spent_s(tuned) / spent_s(every), 3),
        "step_time_s": [
            {
                "layout": one.layout,
                "predicted": one.predicted_s,
                "exhaustive": one.step_time_s,
                "tuned": in_tuning.get(one.layout),
            }
            for one in sorted(every, key=lambda one: one.step_time_s or inf)
        ],
    }


if __name__ == "__main__":
    main()
