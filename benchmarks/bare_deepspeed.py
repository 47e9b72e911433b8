"""The hand-written DeepSpeed loop that `overhead.py` compares `dmt` with.

    torchrun --nproc-per-node 2 benchmarks/bare_deepspeed.py RUN_DIR STEPS DONE

Model, batch sizes and DeepSpeed's JSON are those of a run directory; the data are random
tokens that lie in memory; norms have no weight decay, as usual. No validation, logging
or checkpoint.
"""

import json
import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from ruamel.yaml import YAML
from transformers import AutoConfig, AutoModelForCausalLM


def main() -> None:
    run, steps, done = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    recipe = YAML(typ="safe").load(run / "recipe.yaml")
    settings = json.loads((run / "deepspeed.json").read_text())
    micro = settings["train_micro_batch_size_per_gpu"]
    accumulation = settings["gradient_accumulation_steps"]
    length = recipe["training"]["sequence_length"]

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # minutes of compiling
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    config = AutoConfig.for_model(**recipe["model"]["config"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
    for step in range(steps):
        for _ in range(accumulation):
            tokens = torch.randint(config.vocab_size, (micro, length))
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        if engine.global_rank == 0 and step in (0, steps - 1):
            done.with_suffix(".last" if step else ".first").touch()


if __name__ == "__main__":
    main()
