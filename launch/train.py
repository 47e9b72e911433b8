"""Start the worker directly under a launcher that you already use.

    deepspeed --num_gpus 2 launch/train.py recipes/tiny/llama-bytes.yaml
    torchrun --nproc-per-node 2 launch/train.py recipes/tiny/llama-bytes.yaml
    dmt render recipes/tiny/llama-bytes.yaml --to accelerate > accelerate.yaml
    accelerate launch --config_file accelerate.yaml launch/train.py recipes/…

Where DMT is installed from a wheel, `-m toolkit.train` is the same (deepspeed: `--module`).
Rank 0 plans the recipe, hands the plan to the others, and prints what `dmt launch` prints.
"""

from toolkit.train.__main__ import main

if __name__ == "__main__":
    main()
