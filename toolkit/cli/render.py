"""`dmt render`: print the engine's own configuration for a recipe."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from toolkit.cli.options import Overrides, RecipePath
from toolkit.engines.setup import adopt_engine_config, render_engine_config
from toolkit.errors import PlanError, Problem, RecipeError
from toolkit.plan.planner import plan_recipe
from toolkit.recipe.load import load_recipe


def render(
    recipe: RecipePath,
    to: Annotated[
        Literal["deepspeed"], typer.Option("--to", help="Whose configuration.")
    ] = "deepspeed",
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    out: Annotated[
        Path | None, typer.Option("--out", help="File to write; default: standard output.")
    ] = None,
) -> None:
    """Print the configuration that a recipe becomes: DeepSpeed's JSON, every value filled.

    Example: dmt render recipes/tiny/llama-bytes.yaml --to deepspeed --set parallel.zero.stage=3
    """
    loaded = adopt_engine_config(load_recipe(recipe, overrides))
    plan = plan_recipe(loaded)
    if plan.engine != to:
        raise PlanError(
            f"{recipe} runs on the engine {plan.engine}, which reads no {to} configuration",
            fix=f"--set parallel.engine={to}",
        )
    text = json.dumps(render_engine_config(loaded, plan), indent=2)
    if out is None:
        typer.echo(text)
    else:
        _write(out, text + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        found = f"{path} ({error.strerror})"
        raise RecipeError([Problem("--out", found, "a file that can be written")]) from error
