"""The functions for a user's own script. Heavy imports are deferred until they are called."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.errors import PlanError
from toolkit.foreign import preflight
from toolkit.foreign.accelerate import ENGINES
from toolkit.foreign.accelerate_file import in_accelerate, in_scripts, refuse_kernels
from toolkit.foreign.environment import SWITCHES, mesh_variables
from toolkit.intake.load import load_recipe
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import check_world
from toolkit.text.terminal import tell

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from toolkit.accelerate.planned import PlannedAccelerator

Arguments = TypeVar("Arguments", bound="TrainingArguments")


def accelerator(
    recipe: Recipe | Path | str, overrides: Sequence[str] = (), **more: Any
) -> "PlannedAccelerator":
    """An Accelerator that shards, accumulates and computes as the recipe's plan says.

    It has the recipe as `.recipe` and the plan as `.plan`, and joins the process group if
    nobody has. `overrides` are those of `dmt launch --set`, where `recipe` is a file. `more`
    goes to `accelerate.Accelerator` (trackers, project folder, …).

    Raises RecipeError or PlanError where the recipe is wrong, has other processes than the
    launcher started, has a plan that Accelerate cannot run, or was started for another engine;
    BackendUnavailable where DeepSpeed's operators cannot be built.
    """
    loaded, plan = planned_for_launcher(recipe, overrides)
    if (context := plan.layout.cp) > 1:
        raise PlanError(
            f"{loaded.name} has context {context}, and a loop of your own would have to split "
            "its sequences and count its tokens accordingly",
            fix="use a Trainer, which does, with toolkit.accelerate.training_arguments; or "
            "--set parallel.context=1",
        )
    from toolkit.accelerate.planned import PlannedAccelerator

    return PlannedAccelerator(loaded, plan, **more)


def training_arguments(
    recipe: Recipe | Path | str,
    overrides: Sequence[str] = (),
    *,
    config_class: "type[Arguments] | None" = None,
    **more: Any,
) -> "Arguments":
    """TrainingArguments of a recipe: batch, optimizer, precision, length and parallelism.

    `config_class` is TrainingArguments or a subclass of it (TRL's SFTConfig, DPOConfig, …).
    `more` are arguments of that class (`output_dir`, saving, reporting, …); one that the recipe
    gives as well takes precedence over it, except those that state the engine. All is in the
    fields: arguments created from `to_dict()` train the same way. The learning rate's schedule
    is the recipe's but up to one step late, as Trainer's warm-ups begin at 0;
    `toolkit.accelerate.trainer.RecipeTrainer` has the recipe's own.

    Raises as `accelerator` does, and PlanError where `more` states another engine.
    """
    loaded, plan = planned_for_launcher(recipe, overrides)
    from transformers import TrainingArguments

    from toolkit.accelerate.trainer import arguments_of

    made: Arguments = arguments_of(loaded, plan, config_class or TrainingArguments, more)
    return made


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
    preflight(recipe, plan, "worker", _tell_once)
    return recipe, plan


def _refuse_other_engine(plan: Plan, mesh: Mapping[str, str]) -> None:
    """Accelerate lets these variables add an engine, or a mesh, to what the script asks for."""
    for variable, (kind, _) in SWITCHES.items():
        if variable in mesh and all(os.environ.get(name) == mesh[name] for name in mesh):
            continue
        engine = ENGINES.get(kind, "a parallelism_config")
        if os.environ.get(variable, "").lower() == "true" and engine != plan.engine:
            other = f"unset {variable}"
            if engine in BACKENDS.names and BACKENDS[engine].accelerate is not None:
                other = f"--set parallel.engine={engine}"
            raise PlanError(
                f"{variable}=true: the launcher is configured for {engine}, the recipe runs on "
                f"the engine {plan.engine}",
                fix=f"start with the file that `dmt render RECIPE --to accelerate` writes, or "
                f"{other}",
            )


def _tell_once(message: str) -> None:
    """Every rank finds the same; one reports it."""
    if int(os.environ.get("RANK", 0)) == 0:
        tell(message)
