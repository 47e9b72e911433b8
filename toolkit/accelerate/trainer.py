"""transformers' TrainingArguments from a recipe and its plan."""

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainingArguments

from toolkit.accelerate.config import MIXED_PRECISION
from toolkit.accelerate.planned import PlannedAccelerator
from toolkit.accelerate.samples import TrainingSamples
from toolkit.plan.layout import total_steps
from toolkit.plan.planner import Plan
from toolkit.recipe.schema import Recipe, ScheduleSection
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
        **_schedule(recipe, more),
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


class RecipeTrainer(Trainer):  # type: ignore[misc] # transformers' bases have no types
    """Trainer with the recipe's data order and learning rates, which no argument can say.

    `arguments` are Trainer's. The data set is one whose order is the recipe's already:
    `toolkit.accelerate.samples.TrainingSamples`.
    """

    lr_scheduler: LambdaLR | None

    def __init__(self, recipe: Recipe, **arguments: Any) -> None:
        self.recipe = recipe
        super().__init__(**arguments)

    def _get_train_sampler(self, dataset: TrainingSamples | None = None) -> Sampler[int]:
        return SequentialSampler(dataset or self.train_dataset)

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LambdaLR:
        """The recipe's schedule in place of the one that the arguments name."""
        if self.lr_scheduler is None:
            self.lr_scheduler = lr_scheduler(
                self.recipe, optimizer or self.optimizer, num_training_steps
            )
        return self.lr_scheduler


def nearest_schedule(schedule: ScheduleSection, peak: float) -> dict[str, Any]:
    """The recipe's schedule in TrainingArguments, for a plain Trainer: at most one step late.

    `peak` is the learning rate that warm-up ends at.
    """
    smallest = schedule.min_learning_rate
    names: dict[str, tuple[str, dict[str, Any]]] = {
        "constant": ("constant_with_warmup", {}),
        "linear": ("polynomial", {"lr_end": smallest, "power": 1.0}),
        "cosine": ("cosine_with_min_lr", {"min_lr": smallest}),
        "wsd": (
            "warmup_stable_decay",
            {
                "num_decay_steps": schedule.decay_steps,
                "min_lr_ratio": smallest / peak,
                "decay_type": "linear",
            },
        ),
    }
    name, options = names[schedule.name]
    return {
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": options,
        "warmup_steps": schedule.warmup_steps,
    }


def lr_scheduler(recipe: Recipe, optimizer: Optimizer, steps: int) -> LambdaLR:
    """The recipe's learning rate over `steps` optimizer steps, for any torch optimizer.

    In transformers' own schedules the first step of a warm-up has the rate 0, and what
    follows is late by up to one step.
    """
    peak = recipe.optimizer.learning_rate

    def factor(step: int) -> float:
        # The scheduler asks for one step more than are done.
        return learning_rate(min(step, steps - 1), steps, peak, recipe.schedule) / peak

    return LambdaLR(optimizer, factor)


def _schedule(recipe: Recipe, more: Mapping[str, Any]) -> dict[str, Any]:
    nearest = nearest_schedule(recipe.schedule, recipe.optimizer.learning_rate)
    return {} if nearest.keys() & more.keys() else nearest


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
