"""The functions for a user's own script. Heavy imports are deferred until they are called."""

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.backend import BACKENDS, InAccelerate, adopt_engine_config
from toolkit.errors import PlanError, RunFailed
from toolkit.foreign import preflight
from toolkit.foreign.accelerate_file import (
    MIXED_PRECISION,
    in_accelerate,
    in_scripts,
    refuse_kernels,
)
from toolkit.foreign.environment import ENGINES, SWITCHES, accelerate_settings, mesh_variables
from toolkit.intake.load import load_recipe
from toolkit.layout import Layout
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe, ScheduleSection
from toolkit.run.assignment import check_world
from toolkit.text.terminal import tell

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainingArguments

Arguments = TypeVar("Arguments", bound="TrainingArguments")
_OF_ACCELERATOR = (
    "cpu", "mixed_precision", "deepspeed_plugin", "fsdp_plugin", "parallelism_config",
    "gradient_accumulation_steps", "gradient_accumulation_plugin",
)  # fmt: skip
"""Arguments of an Accelerator that the plan decides."""


def prepare(
    recipe: Recipe | Path | str, overrides: Sequence[str] = (), **more: Any
) -> "Accelerator":
    """An Accelerator that shards, accumulates and computes as the recipe's plan says.

    It has the recipe as `.recipe` and the plan as `.plan`. The process group is joined if no
    one has. `overrides` are those of `dmt launch --set`, where `recipe` is a file. `more` goes
    to `accelerate.Accelerator` (trackers, project folder, …).

    Raises RecipeError or PlanError where the recipe is wrong, where the launcher's number of
    processes or engine is another than the recipe's, and where Accelerate cannot run the plan.
    Raises BackendUnavailable where DeepSpeed's operators cannot be built, and RunFailed if
    Accelerate did not follow the plan.
    """
    loaded, plan = planned_for_launcher(recipe, overrides)
    _refuse_decided(_OF_ACCELERATOR, more, plan)
    words, layout = in_accelerate(loaded, plan), plan.layout
    _prepare_process(words, layout)
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin

    config = BACKENDS[plan.engine].render(loaded, layout)
    precision = MIXED_PRECISION[loaded.training.precision]
    settings = words.accelerator(layout, precision, config)
    handlers = [*settings.pop("kwargs_handlers", ()), *more.pop("kwargs_handlers", ())]
    accelerator = Accelerator(
        mixed_precision=precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=layout.gradient_accumulation,
            sync_with_dataloader=False,  # the recipe counts steps across epochs
            sync_each_batch=words.reduces_every_batch(layout),
        ),
        kwargs_handlers=handlers,
        **settings,
        **more,
    )
    words.complete(accelerator, settings)
    kind, processes = accelerator.distributed_type.value, accelerator.num_processes
    planned = words.distributed_type(layout.world)
    if processes != layout.world or (words.fields and kind != planned):
        raise RunFailed(
            f"planned: {planned} on {layout.world} ranks; Accelerate: {kind} on {processes}",
            fix="report this, with the versions of accelerate and torch",
            retry=False,
        )
    with accelerator.local_main_process_first():
        BACKENDS[plan.engine].prepare(config, tell)
    accelerator.recipe, accelerator.plan = loaded, plan
    return accelerator


def training_arguments(
    recipe: Recipe | Path | str,
    overrides: Sequence[str] = (),
    *,
    config_class: "type[Arguments] | None" = None,
    **more: Any,
) -> "Arguments":
    """TrainingArguments of a recipe: batch, optimizer, precision, length and parallelism.

    `config_class` is TrainingArguments or a subclass of it (TRL's SFTConfig, DPOConfig, …).
    `more` are further arguments of that class (`output_dir`, saving, reporting, …). They
    override what the recipe says. Those that choose another engine raise PlanError. The fields
    hold everything: arguments created from `to_dict()` train the same way. The learning rate
    follows the recipe's schedule at most one step late, because Trainer's warm-ups begin at 0.

    Raises as `prepare` does, and PlanError where `more` states another engine or the recipe has
    what no argument can state.
    """
    loaded, plan = planned_for_launcher(recipe, overrides)
    _refuse_unstated(loaded, plan, more)
    words = in_accelerate(loaded, plan)
    config = BACKENDS[plan.engine].render(loaded, plan.layout)
    of_engine = words.training_arguments(plan.layout, config)
    _prepare_process(words, plan.layout)
    import torch
    from transformers import TrainingArguments

    create: Any = config_class or TrainingArguments
    names = {field.name for field in fields(create)}
    of_recipe = _of_recipe(loaded, plan, words, more, names)
    on_cpus = not torch.cuda.is_available()
    arguments: Arguments = create(**{"use_cpu": on_cpus, **of_engine, **of_recipe, **more})
    with arguments.main_process_first(local=True):
        BACKENDS[plan.engine].prepare(config, tell)
    return arguments


def planned_for_launcher(
    recipe: Recipe | Path | str, overrides: Sequence[str]
) -> tuple[Recipe, Plan]:
    """The recipe, and its plan for the processes that the launcher started."""
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(Path(recipe), overrides)
    elif overrides:
        raise ValueError("overrides change a recipe's file: pass its path, not the Recipe")
    check_world(recipe, int(os.environ.get("WORLD_SIZE", 1)))
    refuse_kernels(recipe)
    recipe = in_scripts(adopt_engine_config(recipe))
    plan = plan_recipe(recipe)
    words = in_accelerate(recipe, plan)
    _refuse_other_engine(plan, mesh_variables(words.mesh(plan.layout)))
    preflight(recipe, "worker")
    return recipe, plan


def _refuse_other_engine(plan: Plan, mesh: Mapping[str, str]) -> None:
    """Raise PlanError for variables by which Accelerate adds an engine or a mesh."""
    for variable, (kind, _) in SWITCHES.items():
        if variable in mesh and all(os.environ.get(name) == mesh[name] for name in mesh):
            continue
        engine = ENGINES.get(kind, "a parallelism_config")
        if os.environ.get(variable, "").lower() == "true" and engine != plan.engine:
            raise PlanError(
                f"{variable}=true: the launcher is configured for {engine}, the recipe runs on "
                f"the engine {plan.engine}",
                fix="start with the file that `dmt render RECIPE --to accelerate` writes, or "
                f"unset {variable}",
            )


def _prepare_process(words: InAccelerate, layout: Layout) -> None:
    """Prepare this process so that Accelerate can run a plan.

    The process group is joined as DMT's worker does, so that Accelerate finds one of the right
    backend. Variables that state what the recipe states are removed: Accelerate, DeepSpeed's
    plugin and the Trainer take from them whatever a script leaves open, and Accelerate forgets
    DeepSpeed where ACCELERATE_USE_CPU is set.
    """
    import torch
    import torch.distributed as dist

    from toolkit.engines.distributed import join

    # DeepSpeed calls functions of torch by their former names, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not dist.is_initialized():
        join()
    if not torch.cuda.is_available():
        # Unset, Accelerate would count physical cores, which containers do not know.
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    for name in accelerate_settings(os.environ):
        del os.environ[name]
    # Not as an argument: TRL's copies of a Trainer's arguments lose it.
    os.environ.update(mesh_variables(words.mesh(layout)))
    words.prepare_process()


def _refuse_unstated(recipe: Recipe, plan: Plan, more: Mapping[str, Any]) -> None:
    """Raise PlanError for settings that TrainingArguments cannot or must not state."""
    unstated = dict.fromkeys(recipe.follows_validation, "null")
    if "TrainingArguments" not in recipe.optimizer.kind.elsewhere:
        unstated["optimizer.name"] = "adamw"
    if recipe.schedule.name == "plateau":
        unstated["schedule.name"] = "cosine"
    if recipe.optimizer.groups:
        unstated["optimizer.groups"] = "[]"
    if unstated:
        raise PlanError(
            f"{recipe.name} has {', '.join(unstated)}, which TrainingArguments cannot state",
            fix=" ".join(f"--set {key}={value}" for key, value in unstated.items())
            + ", or train with `dmt launch`",
        )
    engines = [BACKENDS[name].accelerate for name in BACKENDS.names]
    stating = [field for words in engines for field in getattr(words, "fields", ())]
    _refuse_decided((*stating, "parallelism_config", "use_cpu"), more, plan)


def _refuse_decided(names: Iterable[str], more: Mapping[str, Any], plan: Plan) -> None:
    """Raise PlanError where `more` has one of these arguments, which the plan decides."""
    if given := [name for name in names if name in more]:
        raise PlanError(
            f"{given[0]} is given, but the recipe's plan decides it: engine {plan.engine}",
            fix=f"leave {given[0]} out; state another engine or precision in the recipe or the "
            'overrides, as in ["parallel.engine=fsdp"]',
        )


def _of_recipe(
    recipe: Recipe, plan: Plan, words: InAccelerate, more: Mapping[str, Any], names: set[str]
) -> dict[str, Any]:
    """The recipe's settings, apart from the engine, for a class with the fields `names`."""
    precision, steps = recipe.training.precision, recipe.total_steps()
    optimizer = recipe.optimizer
    length = {"max_steps": steps} if steps else {"num_train_epochs": recipe.training.epochs}
    schedule = nearest_schedule(
        recipe.schedule, more.get("learning_rate", recipe.optimizer.learning_rate)
    )
    if "lr_scheduler_type" in more:  # the options are those of the recipe's
        del schedule["lr_scheduler_kwargs"]
    stated = {
        "per_device_train_batch_size": plan.layout.micro_batch,
        "gradient_accumulation_steps": plan.layout.gradient_accumulation,
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "optim": optimizer.kind.elsewhere["TrainingArguments"],
        "max_grad_norm": optimizer.clip_grad_norm or 0.0,
        "seed": recipe.training.seed,
        **({} if {"max_steps", "num_train_epochs"} & more.keys() else length),
        **schedule,
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
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
    if not {"activation_checkpointing", "gradient_checkpointing"} & more.keys():
        # transformers renames it; TRL's own default is to recompute.
        name = next(n for n in ("activation", "gradient") if f"{n}_checkpointing" in names)
        recomputes = plan.layout.recompute == "full" and not words.recomputes
        stated[f"{name}_checkpointing"] = recomputes
        if recomputes:
            stated[f"{name}_checkpointing_kwargs"] = {"use_reentrant": False}
    if "max_length" in names:  # TRL's classes
        stated["max_length"] = recipe.training.sequence_length
    return stated


def nearest_schedule(schedule: ScheduleSection, peak: float) -> dict[str, Any]:
    """The recipe's schedule in TrainingArguments: at most one step late.

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
