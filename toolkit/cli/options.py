"""Arguments and options that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe YAML.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set training.steps=20."
    ),
]
RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="Default: runs/NAME, as the recipe is called.")
]
