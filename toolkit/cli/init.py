"""`dmt init`: a first recipe for a model and a cluster, on standard output or in a file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import PlanError
from toolkit.hardware.cluster_file import find_cluster
from toolkit.starter.draft import Task, shipped_sizes
from toolkit.starter.text import starter
from toolkit.text.terminal import tell

# A file system's list of the shipped recipes; this module is imported for this verb only.
_SIZES = tuple(shipped_sizes())


def init(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hub id, local folder with a config.json, or a shipped size (see "
            "`dmt recipes`), e.g. llama-3.1-8b.",
            autocompletion=lambda: _SIZES,
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
    task: Annotated[Task, typer.Option(help="What to train the model for.")] = "pretrain",
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="A local file to train on, for an epoch: text, or rows of conversations or "
            "preferences. It decides the data section, the batch and the warm-up.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; by default, standard output."),
    ] = None,
) -> None:
    """Write a short recipe whose layout is `auto`, with the planned values in comments.

    Example: `dmt init llama-3.1-8b --cluster 4x8xh100-80gb --out recipe.yaml`
    """
    text = starter(model, find_cluster(cluster), cluster, task, data)
    if out is None:
        tell(text, sys.stdout)
        return
    try:
        with out.open("x", encoding="utf-8") as new:
            new.write(f"{text}\n")
    except OSError as error:
        raise PlanError(
            f"--out: cannot write {out}: {error.strerror}", fix="name a file that is not there"
        ) from error
    tell(f"wrote {out}; next: dmt check {out}")
