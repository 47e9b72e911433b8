"""A pipeline of two stages, one of which computes at half speed: layers 2:1 against even ones.

    python benchmarks/uneven_pipeline.py [--steps 12] [--out benchmarks/results/…json]

The second rank waits after every pass as long as that pass took (processor time of its
thread), so that it is half as fast whatever else the machine does; messages and the update are
not slowed. Ideal is the step in which both ranks always compute: the passes' processor time of
an undisturbed run over the sum of the speeds, and the pipeline's filling, one micro batch on
the other stage. Quoted are the fastest fourth of the steps: what else runs on the machine
makes others longer.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECIPE = "recipes/tiny/llama-bytes.yaml"
LAYERS, MICRO_BATCHES = 12, 16
SLOWED = 0.5
TOLERANCE = 1e-5
SETTINGS = {
    "model.config.num_hidden_layers": LAYERS,
    "parallel.engine": "megatron",
    "parallel.pipeline": 2,
    "training.sequence_length": 64,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 2 * MICRO_BATCHES,
    "logging.every_steps": 1,
    "evaluation.every_steps": "null",
    "checkpoint.every_steps": "null",
    "checkpoint.export": "false",
    "schedule.warmup_steps": 0,
}
THROTTLE = """
import json, os, time
rank = os.environ.get("RANK")
if rank and os.environ.get("PASSES"):
    from megatron.core.pipeline_parallel import schedules
    busy = []
    def timed(compute):
        def slowed(*arguments, **options):
            before = time.thread_time()
            found = compute(*arguments, **options)
            spent_s = time.thread_time() - before
            if rank == os.environ.get("SLOWED"):
                time.sleep(spent_s)
            busy.append(spent_s)
            if len(busy) % 32 == 0:
                with open(f"{os.environ['PASSES']}-{rank}", "w") as file:
                    json.dump(busy, file)
            return found
        return slowed
    schedules.forward_step = timed(schedules.forward_step)
    schedules.backward_step = timed(schedules.backward_step)
"""


def run(folder: Path, name: str, stages: list[int], slowed: str, steps: int) -> dict[str, Any]:
    """Losses, seconds of each step, and seconds that each rank computes in a step."""
    settings = SETTINGS | {"parallel.stages": stages, "training.steps": steps}
    command = [
        sys.executable,
        "-c",
        "from toolkit.cli.entry import main; main()",
        "launch",
        RECIPE,
    ]
    command += ["--run-dir", str(folder / name)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PASSES": str(folder / f"{name}-passes"),
        "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}:{Path.cwd()}",
        "SLOWED": slowed,
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    metrics = [one for one in map(json.loads, lines) if "loss" in one]
    passes = 2 * MICRO_BATCHES
    busy = []
    for rank in (0, 1):
        spent = json.loads(Path(f"{folder}/{name}-passes-{rank}").read_text())
        each = [sum(spent[i : i + passes]) for i in range(0, len(spent) - passes + 1, passes)]
        busy.append(_fastest(each[1:]))
    return {
        "losses": [one["loss"] for one in metrics],
        "step_s": [one["step_time_s"] for one in metrics][1:],
        "busy_s": busy,
    }


def _fastest(seconds: list[float]) -> float:
    """The mean of the fastest fourth."""
    return statistics.mean(sorted(seconds)[: max(1, len(seconds) // 4)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    even, uneven = [LAYERS // 2, LAYERS // 2], [2 * LAYERS // 3, LAYERS // 3]
    cases = {"plain": (even, ""), "even": (even, "1"), "uneven": (uneven, "1")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(THROTTLE)
        runs = {
            case: run(folder, case, stages, slowed, options.steps)
            for case, (stages, slowed) in cases.items()
        }
    work_s = sum(runs["plain"]["busy_s"])
    ideal_s = work_s / (1 + SLOWED) * (1 + 1 / MICRO_BATCHES)
    step_s = {case: _fastest(found["step_s"]) for case, found in runs.items()}
    pairs = [*zip(runs["plain"]["losses"], runs["uneven"]["losses"], strict=True)]
    result = {
        "stages": {case: stages for case, (stages, _) in cases.items()},
        "speeds": [1, SLOWED],
        "micro_batches": MICRO_BATCHES,
        "ideal_step_s": round(ideal_s, 4),
        "step_s": {case: round(one, 4) for case, one in step_s.items()},
        "busy_s": {case: [round(s, 4) for s in one["busy_s"]] for case, one in runs.items()},
        "over_ideal": {
            case: round(step_s[case] / ideal_s - 1, 3) for case in ("even", "uneven")
        },
        "largest_loss_difference": max(abs(a / b - 1) for a, b in pairs),
        "steps": options.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n", encoding="utf-8")
    if result["largest_loss_difference"] > TOLERANCE:
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
