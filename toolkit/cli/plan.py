"""`dmt plan`: how a recipe would be laid out, without starting anything."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from toolkit.cli.options import Overrides, RecipePath
from toolkit.recipe.load import load_recipe


def plan(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    as_json: Annotated[
        bool, typer.Option("--json", help="Print machine output alone on standard output.")
    ] = False,
) -> None:
    """Say how a recipe would be laid out, and why.

    Example: dmt plan recipes/llama/llama-3.1-8b-pretrain.yaml
    """
    from toolkit.train.assignment import decide

    assignment = decide(load_recipe(recipe, overrides), None)
    decided = assignment.plan
    if as_json:
        typer.echo(json.dumps(decided.to_dict()))
        return
    layout = {key: value for key, value in asdict(decided.layout).items() if value != 1}
    typer.echo(f"{recipe}: {decided.parameters / 1e9:.3g} B parameters")
    typer.echo(f"  engine {decided.engine}, model {decided.model}")
    typer.echo("  " + ", ".join(f"{key} {value}" for key, value in layout.items()))
    for reason in decided.reasons:
        typer.echo(f"  - {reason}")
