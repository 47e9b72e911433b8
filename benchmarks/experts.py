"""Grouped against sequential experts of transformers' models: time of a step on this machine's
processor.

    python benchmarks/experts.py [--engine fsdp | ddp | deepspeed] [--micro-batch 1]
        [--pairs 5] [--steps 20] [--out benchmarks/results/…json]

Eight experts of 256 × 512, two for each token, in four layers; two processes, each with four
samples of 128 tokens in micro batches. The losses of both must agree.
"""

import json
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pairs

RECIPE = Path("recipes/tiny/mixtral-bytes.yaml")
SIZES = (
    "model.config.hidden_size=256", "model.config.intermediate_size=512",
    "model.config.num_local_experts=8", "training.global_batch_size=8",
    "schedule.warmup_steps=0", "parallel.zero.stage=auto",
)  # fmt: skip
SAMPLE = 128
"""Tokens of the recipe's sequences."""
LOGGED_EVERY = 2
KINDS = ("grouped", "sequential")


def losses(folder: Path) -> list[float]:
    """Those that a run logged."""
    lines = (folder / "dmt" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def pair(settings: tuple[str, ...], steps: int) -> dict[str, tuple[float, float]]:
    """Seconds and processor seconds of a step of each kind, in one pair of runs that take
    turns, from the first logged step to the last."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        runs, folders = {}, {kind: Path(name, kind) for kind in KINDS}
        for kind, folder in folders.items():
            of_kind = (*SIZES, *settings, f"kernels.experts={kind}")
            run = pairs.dmt(folder, RECIPE, of_kind, steps, logged_every=LOGGED_EVERY)
            runs[kind] = ends.enter_context(run)
        running = [*runs.values()]
        while running:
            running = [run for run in running if not run.turn()]
        for run in runs.values():
            run.end()
        grouped, sequential = (losses(folder) for folder in folders.values())
        for one, other in zip(grouped, sequential, strict=True):
            if not abs(one - other) <= pairs.LOSS_TOLERANCE * other:
                sys.exit(f"losses differ: {one} grouped, {other} sequential")
        timed = steps - 1
        return {kind: (run.ran_s / timed, run.cpu_s / timed) for kind, run in runs.items()}


def main() -> None:
    parser = pairs.parser(__doc__)
    parser.add_argument("--engine", choices=("fsdp", "ddp", "deepspeed"), default="fsdp")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.set_defaults(pairs=5, steps=20)
    options = parser.parse_args()
    size = options.micro_batch
    settings = (f"parallel.engine={options.engine}", f"training.micro_batch_size={size}")
    found = []
    for _ in range(options.pairs):
        found.append(pair(settings, options.steps))
        print(*(f"{kind} {s * 1e3:.0f} ms" for kind, (s, _) in found[-1].items()), flush=True)

    def ratios(what: int) -> dict[str, Any]:
        of_pairs = [one["sequential"][what] / one["grouped"][what] for one in found]
        return pairs.median_and_all(of_pairs)

    result = {
        "engine": options.engine,
        "tokens_per_micro_batch": SAMPLE * size,
        "speed_ratio_grouped_to_sequential": ratios(0),
        "processor_time_ratio_sequential_to_grouped": ratios(1),
        "milliseconds_per_step": {
            kind: round(1e3 * statistics.median(one[kind][0] for one in found), 1)
            for kind in KINDS
        },
    }
    pairs.report(result, ("torch", "transformers"), options.out, RECIPE)


if __name__ == "__main__":
    main()
