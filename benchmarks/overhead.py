"""Cost of DMT against a hand-written loop of the same engine: tokens/s and time to the
first step.

    python benchmarks/overhead.py [--engine deepspeed | megatron] [--pairs 7] [--steps 150]
        [--out benchmarks/results/…json]
"""

import pairs

ENGINES = {
    "deepspeed": [],
    "megatron": [
        "parallel.engine=megatron", "parallel.zero.stage=auto", "parallel.tensor=2",
        "parallel.sequence=false",
    ],
}  # fmt: skip
"""What each engine changes in the recipe; its bare loop is bare_ENGINE.py."""
PACKAGES = {"deepspeed": "deepspeed", "megatron": "megatron-core"}


def main() -> None:
    parser = pairs.parser(__doc__)
    parser.add_argument("--engine", choices=ENGINES, default="deepspeed")
    options = parser.parse_args()
    engine, runs = options.engine, pairs.Pairs("bare", options.steps)
    for _ in range(options.pairs):
        runs.run(ENGINES[engine], f"bare_{engine}.py")
    packages = ("torch", "transformers", PACKAGES[engine])
    pairs.report({"engine": engine, **runs.result()}, packages, options.out)


if __name__ == "__main__":
    main()
