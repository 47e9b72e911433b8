"""Grouped against sequential experts of transformers' models: time of a step on this machine's
processor.

    python benchmarks/experts.py [--engine fsdp | ddp | deepspeed] [--pairs 5] [--steps 20]
        [--out benchmarks/results/…json]

Eight experts of 256 × 512, two for each token, in four layers; two processes. The losses of
both must agree.
"""

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pairs

RECIPE = Path("recipes/tiny/mixtral-bytes.yaml")
SIZES = (
    "model.config.hidden_size=256", "model.config.intermediate_size=512",
    "model.config.num_local_experts=8", "training.global_batch_size=8",
    "schedule.warmup_steps=0", "parallel.zero.stage=auto",
)  # fmt: skip
KINDS = ("grouped", "sequential")


def losses(folder: Path) -> list[float]:
    """Those that a run logged."""
    lines = (folder / "dmt" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def pair(engine: str, steps: int) -> dict[str, float]:
    """Seconds of a step of each kind, in one pair of runs that take turns."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        runs, folders = {}, {kind: Path(name, kind) for kind in KINDS}
        for kind, folder in folders.items():
            settings = (*SIZES, f"parallel.engine={engine}", f"kernels.experts={kind}")
            run = pairs.dmt(folder, RECIPE, settings, steps, logged_every=2)
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
        return {kind: run.ran_s / (steps - 1) for kind, run in runs.items()}


def main() -> None:
    parser = pairs.parser(__doc__)
    parser.add_argument("--engine", choices=("fsdp", "ddp", "deepspeed"), default="fsdp")
    parser.set_defaults(pairs=5, steps=20)
    options = parser.parse_args()
    found = []
    for _ in range(options.pairs):
        found.append(pair(options.engine, options.steps))
        print(
            ", ".join(f"{kind} {s * 1e3:.0f} ms" for kind, s in found[-1].items()), flush=True
        )
    ratios = [one["sequential"] / one["grouped"] for one in found]
    result = {
        "engine": options.engine,
        "speed_ratio_grouped_to_sequential": pairs.median_and_all(ratios),
        "milliseconds_per_step": [
            {kind: round(s * 1e3, 1) for kind, s in one.items()} for one in found
        ],
    }
    pairs.report(result, ("torch", "transformers"), options.out, RECIPE)


if __name__ == "__main__":
    main()
