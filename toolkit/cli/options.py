"""Arguments and options that several verbs share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import Problem, RecipeError

RecipePath = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="A YAML file, or a name that `dmt recipes` lists."),
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, e.g. --set training.steps=20."
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print machine output alone on standard output.")
]


def _run_dir(path: str) -> Path:
    if not path.strip():
        raise typer.BadParameter("it is empty; allowed: a path, e.g. runs/first")
    return Path(path)


RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", parser=_run_dir, metavar="PATH", help="Run directory; default: runs/NAME."
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="CLUSTER",
        help="Instead of the recipe's cluster: NODESxGPUSxNAME, e.g. 4x8xh100-80gb, or a "
        "cluster file (`dmt doctor --calibrate` writes one for this machine).",
    ),
]


def refuse_useless(stated: Mapping[str, tuple[object, bool, str]]) -> None:
    """Refuse options that would do nothing, so that none is ignored. Each option comes with its
    value, whether the other options allow it, and when they do. Raises RecipeError."""
    problems = [
        Problem(name, str(value), allowed, "leave it out")
        for name, (value, meant, allowed) in stated.items()
        if value and not meant
    ]
    if problems:
        raise RecipeError(problems)
