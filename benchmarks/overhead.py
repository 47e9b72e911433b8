"""Cost of DMT against a hand-written loop of the same engine: tokens/s and time to the
first step.

    python benchmarks/overhead.py [--loop deepspeed | megatron | lora] [--pairs 7]
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
    same_losses: bool = False
    """See `Pairs.same_losses`."""


LOOPS = {
    "deepspeed": Loop("deepspeed"),
    "megatron": Loop(
        "megatron-core",
        (
            "parallel.engine=megatron", "parallel.zero.stage=auto", "parallel.tensor=2",
            "parallel.sequence=false",
        ),
    ),
    # Two processes, as in the others: DDP's reduction is a part of a step. The hand-written
    # loop has no schedule, and at the recipe's own rate rounding grows above 1e-5.
    "lora": Loop(
        "peft",
        (
            "parallel.engine=ddp", "schedule.name=constant", "schedule.warmup_steps=0",
            "optimizer.learning_rate=1.0e-3",
        ),
        Path("recipes/tiny/llama-lora.yaml"),
        same_losses=True,
    ),
}  # fmt: skip


def main() -> None:
    parser = pairs.parser(__doc__)
    parser.add_argument("--loop", choices=LOOPS, default="deepspeed")
    options = parser.parse_args()
    name, loop = options.loop, LOOPS[options.loop]
    runs = pairs.Pairs("bare", options.steps, loop.recipe, loop.same_losses)
    for _ in range(options.pairs):
        runs.run(loop.overrides, f"bare_{name}.py")
    packages = ("torch", "transformers", loop.package)
    pairs.report({"loop": name, **runs.result()}, packages, options.out, loop.recipe)


if __name__ == "__main__":
    main()
