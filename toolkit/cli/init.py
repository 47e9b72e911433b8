"""`dmt init`: a first recipe for a model and a cluster, on standard output."""

import sys
from typing import Annotated

import typer

from toolkit.errors import PlanError
from toolkit.hardware.cluster_file import find_cluster
from toolkit.starter.draft import TASKS
from toolkit.starter.text import starter
from toolkit.terminal import tell


def init(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hub id, local folder with a config.json, or a shipped size (llama-3.1-8b).",
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="CLUSTER",
            help="NODESxGPUSxNAME, e.g. 4x8xh100-80gb, or a cluster file.",
        ),
    ],
    task: Annotated[str, typer.Option(help="pretrain or finetune.")] = "pretrain",
) -> None:
    """Write a short recipe to standard output: the layout `auto`, what it comes to in comments.

    Example: `dmt init llama-3.1-8b --cluster 4x8xh100-80gb > recipe.yaml`
    """
    chosen = next((one for one in TASKS if one == task), None)
    if chosen is None:
        raise PlanError(
            f"--task: found {task[:80]!r}; allowed: {', '.join(TASKS)}", fix="--task pretrain"
        )
    tell(starter(model, find_cluster(cluster), cluster, chosen), sys.stdout)
