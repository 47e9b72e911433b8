"""`dmt render`: print a backend's own configuration for a recipe."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.cli.options import Overrides, RecipePath
from toolkit.errors import PlanError
from toolkit.foreign import accelerate_file
from toolkit.intake.load import load_recipe
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.base import starter
from toolkit.launchers.job import job_of
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import decide
from toolkit.text.terminal import tell

_JOBS = tuple(each.name for each in LAUNCHERS.values() if each.renders)
_CONFIGURED = tuple(name for name in BACKENDS.names if BACKENDS[name].configured)
_ACCELERATE = "accelerate"

if TYPE_CHECKING:
    Name: TypeAlias = str
else:
    Name = Literal[*_CONFIGURED, _ACCELERATE, *_JOBS]


def render(
    recipe: RecipePath,
    to: Annotated[
        Name | None,
        typer.Option(help="Whose configuration. Default: that of the recipe's engine."),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
) -> None:
    """Print the configuration that a recipe becomes, every value filled.

    deepspeed, fsdp, megatron: the engine's arguments as JSON. accelerate: the YAML for
    `accelerate launch --config_file`. slurm, kubernetes: the job that `dmt launch` submits.

    Example: `dmt render llama-bytes --to deepspeed --set parallel.zero.stage=3`

    Example: `dmt render llama-bytes --to accelerate > accelerate.yaml`
    """
    loaded = adopt_engine_config(load_recipe(recipe, overrides))
    if to == _ACCELERATE:
        loaded = accelerate_file.in_scripts(loaded)
    plan = plan_recipe(loaded, explained=False)
    name = to or plan.engine
    if name in _JOBS:
        text = _job(loaded, name)
    elif name == _ACCELERATE:
        text = accelerate_file.render(loaded, plan)
    else:
        shown = BACKENDS[name].shown(loaded, plan) if name in _CONFIGURED else None
        if shown is None:
            engines = [to] if to else _CONFIGURED
            raise PlanError(
                f"{recipe} runs on the engine {plan.engine}, which reads no {name} "
                "configuration",
                fix=" or ".join(f"--set parallel.engine={one}" for one in engines),
            )
        text = json.dumps(shown, indent=2)
    tell(text.rstrip("\n"), sys.stdout)


def _job(loaded: Recipe, launcher: str) -> str:
    spec = starter(launcher).spec(job_of(decide(loaded, None, explained=False)))
    *_, text = spec.files.values()
    return text
