"""DMT against transformers' Trainer, under DDP and ZeRO-2: tokens/s and time to the first step.

    python benchmarks/against_trainer.py [--pairs 7] [--steps 150]
        [--out benchmarks/results/…json]

Model, batch, AdamW, clipping, schedule, precision and logging interval are the recipe's on
both sides; trainer_loop.py says how the Trainer is configured.
"""

import pairs

ENGINES = {
    "ddp": ["parallel.engine=ddp"],
    "zero2": ["parallel.engine=deepspeed", "parallel.zero.stage=2"],
}
"""What each engine changes in the recipe."""


def main() -> None:
    options = pairs.parser(__doc__).parse_args()
    engines = {name: pairs.Pairs("trainer", options.steps) for name in ENGINES}
    for _ in range(options.pairs):
        for engine, runs in engines.items():
            print(engine, end=" ", flush=True)
            runs.run(ENGINES[engine], "trainer_loop.py")
    packages = ("torch", "transformers", "accelerate", "deepspeed")
    result = {engine: runs.result() for engine, runs in engines.items()}
    pairs.report(result, packages, options.out)


if __name__ == "__main__":
    main()
