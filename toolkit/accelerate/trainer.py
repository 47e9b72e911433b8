"""transformers' TrainingArguments from a recipe and its plan."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainingArguments

from toolkit.accelerate.config import MIXED_PRECISION
from toolkit.accelerate.planned import PlannedAccelerator
from toolkit.plan.layout import total_steps
from toolkit.plan.planner import Plan
from toolkit.recipe.schema import Recipe
from toolkit.train.schedule import learning_rate


def arguments_of(recipe: Recipe, plan: Plan, more: Mapping[str, Any]) -> TrainingArguments:
    """See `toolkit.accelerate.training_arguments`.

    The process group, the engine and its settings are set up here, by an Accelerator whose
    state the Trainer's own then shares.
    """
    on_cpu = not torch.cuda.is_available()
    PlannedAccelerator(recipe, plan)
    # Otherwise TrainingArguments makes a second, empty DeepSpeed configuration, and takes the
    # precision of the launcher's file for that of an fp32 recipe.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
    os.environ["ACCELERATE_MIXED_PRECISION"] = MIXED_PRECISION[recipe.training.precision]
    optimizer, training = recipe.optimizer, recipe.training
    shared = {
        "use_configured_state": True,
        "gradient_accumulation_kwargs": {"sync_each_batch": plan.engine == "fsdp"},
    }
    return TrainingArguments(
        per_device_train_batch_size=plan.layout.micro_batch,
        gradient_accumulation_steps=plan.layout.gradient_accumulation,
        **({} if {"max_steps", "num_train_epochs"} & more.keys() else _length(recipe)),
        optim="adamw_torch",
        learning_rate=optimizer.learning_rate,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip_grad_norm or 0.0,
        bf16=training.precision == "bf16",
        fp16=training.precision == "fp16",
        seed=training.seed,
        **_recompute(plan),
        # Loss and gradients are means over the tokens of the global batch.
        average_tokens_across_devices=True,
        # `shift_labels` is no argument of a model's forward, but its loss takes it.
        remove_unused_columns=False,
        accelerator_config=shared,
        use_cpu=on_cpu,
        **more,
    )


def lr_scheduler(recipe: Recipe, optimizer: Optimizer, steps: int) -> LambdaLR:
    """The recipe's learning rate over `steps` optimizer steps, for any torch optimizer.

    transformers' own schedules are one step late: their first step of a warm-up has the
    rate 0.
    """
    peak = recipe.optimizer.learning_rate

    def factor(step: int) -> float:
        # The scheduler asks for one step more than are done.
        return learning_rate(min(step, steps - 1), steps, peak, recipe.schedule) / peak

    return LambdaLR(optimizer, factor)


def _length(recipe: Recipe) -> dict[str, Any]:
    steps = total_steps(recipe.training)
    if steps is not None:
        return {"max_steps": steps}
    return {"num_train_epochs": recipe.training.epochs}


def _recompute(plan: Plan) -> dict[str, Any]:
    """Recompute by the model; FSDP's is in its plugin."""
    if plan.layout.recompute != "full" or plan.engine == "fsdp":
        return {}
    names = {field.name for field in fields(TrainingArguments)}
    # Renamed in transformers 5.
    prefix = "activation" if "activation_checkpointing" in names else "gradient"
    return {
        f"{prefix}_checkpointing": True,
        f"{prefix}_checkpointing_kwargs": {"use_reentrant": False},
    }
