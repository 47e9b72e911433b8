"""`dmt render`: print a backend's own configuration for a recipe."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from toolkit.accelerate import config as accelerate_config
from toolkit.backend import adopt_engine_config
from toolkit.cli.options import Overrides, RecipePath
from toolkit.engines.megatron import config as megatron_config
from toolkit.engines.megatron import pretrain_gpt as megatron_lm
from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.intake.load import load_recipe
from toolkit.launchers import LAUNCHERS
from toolkit.launchers.job import job_of
from toolkit.plan.planner import Plan, plan_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import decide
from toolkit.terminal import tell

Target = Literal[
    "deepspeed", "fsdp", "megatron", "megatron-lm", "accelerate", "slurm", "kubernetes"
]


def render(
    recipe: RecipePath,
    to: Annotated[
        Target | None,
        typer.Option(
            "--to",
            help="Whose configuration; default: that of the engine that the recipe runs on.",
        ),
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; default: standard output.")
    ] = None,
) -> None:
    """Print the configuration that a recipe becomes, every value filled.

    deepspeed: DeepSpeed's JSON. fsdp: the arguments of torch's fully_shard as JSON. megatron:
    the arguments of megatron-core's classes as JSON, every field checked against the installed
    version. megatron-lm: the arguments of Megatron-LM's own pretrain_gpt.py, one per line, to
    be run by `xargs torchrun … pretrain_gpt.py < args.txt`; what they leave to you is printed
    as comments on standard error. accelerate: the YAML that `accelerate launch --config_file`
    takes. slurm, kubernetes: the job that `dmt launch` with that launcher would submit.

    Example: dmt render recipes/tiny/llama-bytes.yaml --to deepspeed --set parallel.zero.stage=3

    Example: dmt render recipes/llama/llama-3.1-405b-pretrain.yaml --to megatron-lm > args.txt

    Example: dmt render recipes/tiny/llama-bytes.yaml --to accelerate --out accelerate.yaml
    """
    loaded = adopt_engine_config(load_recipe(recipe, overrides))
    plan = plan_recipe(loaded)
    target = to or _own_target(recipe, plan)
    if target == "megatron-lm":
        _require(recipe, plan, target, plan.engine == "megatron")
        rendered = megatron_lm.render(loaded, plan.layout)
        for note in rendered.notes:
            tell(f"# {note}")
        text = rendered.text
    elif target == "accelerate":
        text = accelerate_config.render(loaded, plan).rstrip("\n")
    elif target in ("slurm", "kubernetes"):
        text = _job(loaded, target).rstrip("\n")
    else:
        config = _megatron if target == "megatron" else _of_engine
        text = json.dumps(config(recipe, loaded, plan, target), indent=2)
    if out is None:
        tell(text, sys.stdout)
    else:
        _write(out, text + "\n")


def _own_target(recipe: Path, plan: Plan) -> Target:
    if plan.engine != "ddp":
        return plan.engine
    raise PlanError(
        f"{recipe} runs on the engine {plan.engine}, which reads no configuration",
        fix="--set parallel.engine=deepspeed or --set parallel.engine=megatron",
    )


def _require(recipe: Path, plan: Plan, target: Target, able: bool) -> None:
    """Raises PlanError where the plan's engine has nothing to do with `target`."""
    if not able:
        engine = "megatron" if target == "megatron-lm" else target
        raise PlanError(
            f"{recipe} runs on the engine {plan.engine}, which reads no {target} configuration",
            fix=f"--set parallel.engine={engine}",
        )


def _of_engine(recipe: Path, loaded: Recipe, plan: Plan, target: Target) -> dict[str, Any]:
    """`deepspeed.json` or `fsdp.json`."""
    _require(recipe, plan, target, plan.engine == target)
    return plan.backend.render(loaded, plan.layout)


def _megatron(recipe: Path, loaded: Recipe, plan: Plan, target: Target) -> dict[str, Any]:
    """The whole of `megatron.json`, or the model's sections where DeepSpeed trains it."""
    _require(recipe, plan, target, plan.model == "megatron")
    config = megatron_config.render(loaded, plan.layout)
    if plan.engine != "megatron":
        config = {name: config[name] for name in ("transformer", "gpt")}
    from toolkit.engines.megatron.fields import check_fields

    check_fields(config)
    return config


def _job(loaded: Recipe, launcher: str) -> str:
    """The batch script or manifest."""
    spec = LAUNCHERS[launcher]().spec(job_of(decide(loaded, None)))
    *_, text = spec.files.values()
    return text


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        found = f"{path} ({error.strerror})"
        raise RecipeError([Problem("--out", found, "a file that can be written")]) from error
