"""The run of transformers' Trainer that `against_trainer.py` compares `dmt` with.

    torchrun --nproc-per-node 2 benchmarks/trainer_loop.py RUN_DIR STEPS DONE

Model, batch sizes, AdamW, clipping, schedule and DeepSpeed's JSON are those of a run directory;
the data are random tokens that lie in memory. Everything else is the Trainer's own default
(its AdamW is PyTorch's fused one, also under DeepSpeed, whose JSON then has no optimizer). No
validation, checkpoint or progress bar, which `dmt launch` does not draw into a file either. On
a GPU: Liger's kernels, and 16 bits by autocast over fp32 weights.
"""

import json
import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

from ruamel.yaml import YAML
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


class Marker(TrainerCallback):
    """Makes DONE.first and DONE.last after those steps."""

    def __init__(self, done: Path) -> None:
        self.done = done

    def on_step_end(self, _arguments, state, *_, **__) -> None:
        if state.is_world_process_zero and state.global_step in (1, state.max_steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            last = state.global_step > 1
            self.done.with_suffix(".last" if last else ".first").touch()


def deepspeed_config(run: Path) -> dict | None:
    """DeepSpeed's JSON without what the Trainer's arguments say; None for DDP."""
    if not (run / "deepspeed.json").exists():
        return None
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # minutes of compiling
    deepspeed.init_distributed("gloo")
    config = json.loads((run / "deepspeed.json").read_text())
    del config["optimizer"]
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    return config | dict.fromkeys((*sizes, "gradient_accumulation_steps"), "auto")


def arguments(run: Path, recipe: dict, steps: int) -> TrainingArguments:
    """What the recipe says, in the Trainer's words."""
    layout = json.loads((run / "plan.json").read_text())["layout"]
    optimizer = recipe["optimizer"]
    on_cpu = recipe["cluster"]["gpu"] == "cpu"
    return TrainingArguments(
        output_dir=str(run / "trainer"),
        max_steps=steps,
        per_device_train_batch_size=layout["micro_batch"],
        gradient_accumulation_steps=layout["gradient_accumulation"],
        learning_rate=optimizer["learning_rate"],
        adam_beta1=optimizer["betas"][0],
        adam_beta2=optimizer["betas"][1],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["clip_grad_norm"],
        lr_scheduler_type=recipe["schedule"]["name"],  # to 0; one with a minimum fails on ZeRO
        warmup_steps=recipe["schedule"]["warmup_steps"],
        logging_steps=recipe["logging"]["every_steps"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu else None,
        bf16=recipe["training"]["precision"] == "bf16",
        use_liger_kernel=not on_cpu,  # whose kernels are the GPU's
        deepspeed=deepspeed_config(run),
    )


def main() -> None:
    run, steps, done = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    recipe = YAML(typ="safe").load(run / "recipe.yaml")
    options = arguments(run, recipe, steps)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**recipe["model"]["config"])
    config.use_cache = False
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    training = recipe["training"]
    shape = training["global_batch_size"] * steps, training["sequence_length"]
    rows = torch.randint(config.vocab_size, shape)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model=model, args=options, train_dataset=data, callbacks=[Marker(done)])
    trainer.train()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads now and then abort a Python that shuts down


if __name__ == "__main__":
    main()
