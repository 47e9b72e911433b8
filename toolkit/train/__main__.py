"""A rank of a recipe, under a launcher that you already use.

    torchrun --nproc-per-node 2 -m toolkit.train RECIPE
    deepspeed --num_gpus 2 --module toolkit.train RECIPE
    accelerate launch --num_processes 2 -m toolkit.train RECIPE

In a checkout, `launch/train.py` is the same. Rank 0 plans the recipe, hands the plan to the
others, and prints what `dmt launch` prints. `dmt launch` itself starts ranks with the run
directory that it wrote.
"""

import argparse
from pathlib import Path

from toolkit.system.interpreter import importing


def main() -> None:
    """Train this rank and end its process with the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("recipe", type=Path, help="recipe YAML, or a run directory")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE",
        help="override one setting, e.g. --set training.steps=20",
    )  # fmt: skip
    parser.add_argument("--run-dir", type=Path, help="default: runs/<recipe name>")
    # The deepspeed launcher adds this argument; LOCAL_RANK says the same.
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    with importing():
        from toolkit.engines.distributed import end_process
        from toolkit.train.worker import train_recipe, train_run_directory

    if arguments.recipe.is_dir():
        if arguments.overrides or arguments.run_dir is not None:
            parser.error("the recipe of a run directory is final: no --set, no --run-dir")
        end_process(train_run_directory(arguments.recipe))
    end_process(train_recipe(arguments.recipe, arguments.overrides, arguments.run_dir))


if __name__ == "__main__":
    main()
