"""`dmt render`: print a backend's own configuration for a recipe."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.cli.options import Overrides, RecipePath
from toolkit.data.local import with_embedding_rows
from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.intake.load import load_recipe
from toolkit.launcher import LAUNCHERS
from toolkit.launchers.base import starter
from toolkit.launchers.job import job_of
from toolkit.plan.plan import Plan
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import decide
from toolkit.targets.base import TARGETS
from toolkit.text.terminal import tell

_JOBS = tuple(each.name for each in LAUNCHERS.values() if each.renders)
_CONFIGURED = tuple(name for name in BACKENDS.names if BACKENDS[name].configured)
_FORMATS = sorted(
    (name for name, target in TARGETS.items() if target.rendered),
    key=lambda name: not TARGETS[name].engine,  # in the help, next to the engines
)

if TYPE_CHECKING:
    Name: TypeAlias = str
else:
    Name = Literal[*_CONFIGURED, *_FORMATS, *_JOBS]


def render(
    recipe: RecipePath,
    to: Annotated[
        Name | None,
        typer.Option(
            help="Whose configuration; default: that of the engine that the recipe runs on."
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: standard output.")
    ] = None,
) -> None:
    """Print the configuration that a recipe becomes, every value filled.

    deepspeed: DeepSpeed's JSON. fsdp: the arguments of torch's fully_shard as JSON. megatron:
    the arguments of megatron-core's classes as JSON, every field checked against the installed
    version. megatron-lm: the arguments of Megatron-LM's own pretrain_gpt.py, one per line, to
    be run by `xargs torchrun … pretrain_gpt.py < args.txt`; what you have to add is printed as
    comments on standard error. accelerate: the YAML that `accelerate launch --config_file`
    takes. llama-factory, axolotl: the YAML that they train from. trainer: TrainingArguments as
    JSON. skypilot, dstack: a task of theirs that runs the recipe on a cloud. slurm, kubernetes:
    the job that `dmt launch` with that launcher would submit.

    Example: dmt render recipes/tiny/llama-bytes.yaml --to deepspeed --set parallel.zero.stage=3

    Example: dmt render recipes/llama/llama-3.1-405b-pretrain.yaml --to megatron-lm > args.txt

    Example: dmt render recipes/tiny/llama-bytes.yaml --to accelerate --out accelerate.yaml
    """
    loaded = with_embedding_rows(adopt_engine_config(load_recipe(recipe, overrides)))
    format_ = TARGETS[to] if to in _FORMATS else None
    if format_ is not None:
        loaded = format_.adapt(loaded)
    plan = plan_recipe(loaded, explained=False)
    name = to or _own_configuration(recipe, plan)
    notes: Sequence[str] = ()
    if name in _JOBS:
        text = _job(loaded, name)
    elif format_ is None:
        shown = BACKENDS[name].shown(loaded, plan)
        if shown is None:
            raise _not_read_by(recipe, plan, name, name)
        text = json.dumps(shown, indent=2)
    elif format_.engine in ("", plan.engine):
        text, notes = format_.write(loaded, plan)
    else:
        raise _not_read_by(recipe, plan, name, format_.engine)
    for note in notes:
        tell(f"# {note}")
    text = text.rstrip("\n")
    if out is None:
        tell(text, sys.stdout)
    else:
        _write(out, text + "\n")


def _own_configuration(recipe: Path, plan: Plan) -> Name:
    if BACKENDS[plan.engine].configured:
        return plan.engine
    raise PlanError(
        f"{recipe} runs on the engine {plan.engine}, which reads no configuration",
        fix=" or ".join(f"--set parallel.engine={name}" for name in _CONFIGURED),
    )


def _not_read_by(recipe: Path, plan: Plan, name: Name, engine: str) -> PlanError:
    return PlanError(
        f"{recipe} runs on the engine {plan.engine}, which reads no {name} configuration",
        fix=f"--set parallel.engine={engine}",
    )


def _job(loaded: Recipe, launcher: str) -> str:
    spec = starter(launcher).spec(job_of(decide(loaded, None, explained=False)))
    *_, text = spec.files.values()
    return text


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        found = f"{path} ({error.strerror})"
        raise RecipeError([Problem("--out", found, "a file that can be written")]) from error
