"""Cost of DMT against a hand-written loop of the same engine: tokens/s and time to the
first step.

    python benchmarks/overhead.py [--engine deepspeed | megatron | lora] [--pairs 7]
        [--steps 150] [--out benchmarks/results/…json]
"""

from dataclasses import dataclass
from pathlib import Path

import pairs


@dataclass(frozen=True)
class Loop:
    """A hand-written loop, which is bare_NAME.py, and what DMT does in its place."""

    package: str
    """What the loop is written with, besides torch and transformers."""
    overrides: tuple[str, ...] = ()
    recipe: Path = pairs.RECIPE


LOOPS = {
    "deepspeed": Loop("deepspeed"),
    "megatron": Loop(
        "megatron-core",
        (
            "parallel.engine=megatron", "parallel.zero.stage=auto", "parallel.tensor=2",
            "parallel.sequence=false",
        ),
    ),
    # Two processes, as in the others: DDP's reduction is a part of the step. The loop has no
    # schedule, and must have the losses that DMT has.
    "lora": Loop(
        "peft",
        ("parallel.engine=ddp", "schedule.name=constant", "schedule.warmup_steps=0"),
        Path("recipes/tiny/llama-lora.yaml"),
    ),
}  # fmt: skip


def main() -> None:
    parser = pairs.parser(__doc__)
    parser.add_argument("--engine", choices=LOOPS, default="deepspeed")
    options = parser.parse_args()
    name, loop = options.engine, LOOPS[options.engine]
    runs = pairs.Pairs("bare", options.steps, loop.recipe)
    for _ in range(options.pairs):
        runs.run(loop.overrides, f"bare_{name}.py")
    packages = ("torch", "transformers", loop.package)
    pairs.report({"engine": name, **runs.result()}, packages, options.out, loop.recipe)


if __name__ == "__main__":
    main()
