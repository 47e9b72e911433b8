"""A pipeline of two stages, one of which gets half the processor time of the other: layers 2:1
against even ones, and the ideal.

    sudo python benchmarks/uneven_pipeline.py [--steps 7] [--out benchmarks/results/…json]

Throttled as in `uneven.py`. The ideal is that of speeds 1 and 1/2: the step of two fast ranks
with even layers, times 2 / 1.5.
"""

import argparse
import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uneven

LAYERS, MICRO_BATCHES, SAMPLES = 12, 20, 4
SKIPPED = 2
"""The first steps, which are not measured."""
SETTINGS: dict[str, Any] = {
    "model.config.num_hidden_layers": LAYERS,
    "parallel.engine": "megatron",
    "parallel.pipeline": 2,
    "parallel.zero.stage": 0,
    "training.sequence_length": 128,
    "training.micro_batch_size": SAMPLES,
    "training.global_batch_size": SAMPLES * MICRO_BATCHES,
    "checkpoint.every_steps": "null",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    half, third = LAYERS // 2, LAYERS // 3
    cases = {
        "fast": ([half, half], [uneven.FAST, uneven.FAST]),
        "even": ([half, half], [uneven.FAST, uneven.SLOW]),
        "uneven": ([2 * third, third], [uneven.FAST, uneven.SLOW]),
    }
    metrics = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(uneven.THROTTLE)
        for case, (stages, quotas) in cases.items():
            settings = {"parallel.stages": stages, "training.steps": options.steps}
            run = uneven.run(folder, case, SETTINGS | settings, quotas)
            metrics[case] = uneven.lines(run / "metrics.jsonl")
    step_s = {case: uneven.median_step_s(found, SKIPPED) for case, found in metrics.items()}
    ideal_s = step_s["fast"] * 2 / (1 + uneven.SLOW / uneven.FAST)
    losses = {case: [one["loss"] for one in found] for case, found in metrics.items()}
    pairs = [*zip(losses["fast"], losses["uneven"], strict=True)]
    result = {
        "stages": {case: stages for case, (stages, _) in cases.items()},
        "processor_time": {case: quotas for case, (_, quotas) in cases.items()},
        "micro_batches": MICRO_BATCHES,
        "step_s": {case: round(one, 4) for case, one in step_s.items()},
        "ideal_step_s": round(ideal_s, 4),
        "over_ideal": {
            case: round(step_s[case] / ideal_s - 1, 3) for case in ("even", "uneven")
        },
        "largest_loss_difference": max(abs(a / b - 1) for a, b in pairs),
        "steps": options.steps,
        "date": datetime.now(UTC).date().isoformat(),
        "cpus": os.cpu_count(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n", encoding="utf-8")
    if result["largest_loss_difference"] > uneven.TOLERANCE:
        sys.exit("the losses differ")
    if result["over_ideal"]["uneven"] > uneven.WITHIN:
        sys.exit("the step is not within 10% of the ideal")


if __name__ == "__main__":
    main()
