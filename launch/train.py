"""Start the worker directly under a launcher that you already use.

    deepspeed --num_gpus 2 launch/train.py recipes/tiny/llama-bytes.yaml
    torchrun --nproc-per-node 2 launch/train.py recipes/tiny/llama-bytes.yaml
    accelerate launch --config_file launch/accelerate/zero2.yaml --num_processes 2 \\
        launch/train.py recipes/tiny/llama-bytes.yaml

Rank 0 plans the recipe, hands the plan to the others, and prints what `dmt launch` prints.
"""

import argparse
from pathlib import Path

from toolkit.system.interpreter import importing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", type=Path, help="recipe YAML")
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
        from toolkit.train.worker import train_recipe

    end_process(train_recipe(arguments.recipe, arguments.overrides, arguments.run_dir))


if __name__ == "__main__":
    main()
