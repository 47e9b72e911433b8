"""transformers' TrainingArguments from a recipe and its plan."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainingArguments

from toolkit.accelerate.planned import prepare_process
from toolkit.accelerate.samples import TrainingSamples
from toolkit.backend import BACKENDS, InAccelerate
from toolkit.errors import PlanError
from toolkit.foreign.accelerate_file import in_accelerate
from toolkit.foreign.base import written
from toolkit.foreign.facts import values_of
from toolkit.foreign.training_arguments import KEYS
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe, ScheduleSection
from toolkit.text.terminal import tell
from toolkit.train.schedule import learning_rate

_ENGINE = (
    *(
        field
        for engine in BACKENDS.names
        for field in getattr(BACKENDS[engine].accelerate, "fields", ())
    ),
    "parallelism_config",
    "use_cpu",
)
"""The fields that state the engine, each of them a part of what the plan decides."""


def arguments_of(
    recipe: Recipe, plan: Plan, config_class: type[TrainingArguments], more: Mapping[str, Any]
) -> TrainingArguments:
    """See `toolkit.accelerate.training_arguments`."""
    if "TrainingArguments" not in recipe.optimizer.kind.elsewhere:
        raise PlanError(
            f"optimizer.name is {recipe.optimizer.name}, which is not exported to Trainer",
            fix="set optimizer.name to adamw, or train with `dmt launch`",
        )
    _refuse_plateau(recipe)
    for key in recipe.follows_validation:
        raise PlanError(
            f"the recipe has `{key}`, which TrainingArguments cannot state",
            fix=f"--set {key}=null, or train with `dmt launch`",
        )
    for name in _ENGINE:
        if name in more:
            raise PlanError(
                f"{name} is given, but the recipe's plan decides it: engine {plan.engine}",
                fix=f"leave {name} out; state another engine in the recipe or the overrides, "
                'as in training_arguments(recipe, ["parallel.engine=fsdp"])',
            )
    if recipe.optimizer.groups:
        raise PlanError(
            "the recipe has `optimizer.groups`, which TrainingArguments cannot state",
            fix="remove it, or train with `dmt launch`",
        )
    words = in_accelerate(recipe, plan)
    prepare_process(words, plan.layout)
    config = BACKENDS[plan.engine].render(recipe, plan.layout)
    said = {
        "use_cpu": not torch.cuda.is_available(),
        **words.training_arguments(plan.layout, config),
        **_of_recipe(recipe, plan, words, more),
    }
    if "max_length" in (field.name for field in fields(config_class)):  # TRL's classes
        said["max_length"] = recipe.training.sequence_length
    arguments = config_class(**{**said, **more})
    with arguments.main_process_first(local=True):
        BACKENDS[plan.engine].prepare(config, tell)
    return arguments


def _of_recipe(
    recipe: Recipe, plan: Plan, words: InAccelerate, more: Mapping[str, Any]
) -> dict[str, Any]:
    """The recipe's settings, apart from the engine."""
    precision = recipe.training.precision
    return {
        **written(KEYS, values_of(recipe, plan)),
        **({} if {"max_steps", "num_train_epochs"} & more.keys() else _length(recipe)),
        **_schedule(recipe, more),
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        **_recompute(plan.layout.recompute == "full" and not words.recomputes, more),
        # Loss and gradients are means over the tokens of the global batch.
        "average_tokens_across_devices": True,
        # `shift_labels` is no argument of a model's forward, but its loss takes it.
        "remove_unused_columns": False,
        "accelerator_config": {
            "gradient_accumulation_kwargs": {
                "sync_each_batch": words.reduces_every_batch(plan.layout)
            }
        },
    }


class RecipeTrainer(Trainer):  # type: ignore[misc] # transformers' bases have no types
    """Trainer with the recipe's data order and learning rates, which no argument can state.

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
        """The recipe's schedule instead of the one that the arguments name."""
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
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": smallest / peak}),
        "wsd": (
            "warmup_stable_decay",
            {
                "num_decay_steps": schedule.decay_steps,
                "min_lr_ratio": smallest / peak,
                "decay_type": schedule.decay,
            },
        ),
    }
    # transformers refuses a decay that ends where it starts.
    name, options = names["constant" if smallest == peak else schedule.name]
    return {
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": options,
        "warmup_steps": schedule.warmup_ratio or schedule.warmup_steps,  # takes both
    }


def lr_scheduler(recipe: Recipe, optimizer: Optimizer, steps: int) -> LambdaLR:
    """The recipe's learning rate over `steps` optimizer steps, for any torch optimizer.

    In transformers' own schedules the first step of a warm-up has the rate 0, and what
    follows is late by up to one step.
    """
    _refuse_plateau(recipe)
    peak = recipe.optimizer.learning_rate

    def factor(step: int) -> float:
        # The scheduler asks for one step more than are done.
        return learning_rate(min(step, steps - 1), steps, peak, recipe.schedule) / peak

    return LambdaLR(optimizer, factor)


def _refuse_plateau(recipe: Recipe) -> None:
    if recipe.schedule.name == "plateau":
        raise PlanError(
            "schedule.name is plateau, whose warm-up and state transformers' scheduler has not",
            fix="choose another schedule, or train with `dmt launch`",
        )


def _schedule(recipe: Recipe, more: Mapping[str, Any]) -> dict[str, Any]:
    peak = more.get("learning_rate", recipe.optimizer.learning_rate)
    nearest = nearest_schedule(recipe.schedule, peak)
    if "lr_scheduler_type" in more:  # the options are those of the recipe's
        del nearest["lr_scheduler_kwargs"]
    return nearest


def _length(recipe: Recipe) -> dict[str, Any]:
    steps = recipe.total_steps()
    if steps is not None:
        return {"max_steps": steps}
    return {"num_train_epochs": recipe.training.epochs}


def _recompute(recompute: bool, more: Mapping[str, Any]) -> dict[str, Any]:
    """Recompute by the model. TRL's own default is to do it."""
    if {"activation_checkpointing", "gradient_checkpointing"} & more.keys():
        return {}
    names = {field.name for field in fields(TrainingArguments)}
    # Renamed in transformers 5.
    prefix = "activation" if "activation_checkpointing" in names else "gradient"
    said: dict[str, Any] = {f"{prefix}_checkpointing": recompute}
    if recompute:
        said[f"{prefix}_checkpointing_kwargs"] = {"use_reentrant": False}
    return said
