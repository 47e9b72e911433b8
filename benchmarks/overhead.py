"""Cost of DMT against a hand-written DeepSpeed loop: tokens/s and time to the first step.

python benchmarks/overhead.py [--pairs 7] [--steps 150] [--out benchmarks/results/…json]
"""

import pairs


def main() -> None:
    options = pairs.parser(__doc__).parse_args()
    runs = pairs.Pairs("bare", options.steps)
    for _ in range(options.pairs):
        runs.run((), "bare_deepspeed.py")
    pairs.report(runs.result(), ("torch", "transformers", "deepspeed"), options.out)


if __name__ == "__main__":
    main()
