"""`dmt init`: a first recipe for a model and a cluster, on standard output or in a file."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from toolkit.errors import EXIT_USER_ERROR, PlanError
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.starter.draft import Task, shipped_sizes
from toolkit.starter.text import starter
from toolkit.text.redact import redact
from toolkit.text.terminal import tell

# A file system's list of the shipped recipes; this module is imported for this verb only.
_SIZES = tuple(shipped_sizes())

_Files = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Write the recipe from another tool's file; repeat it. MODEL and --task are "
        "then what the files do not state.",
    ),
]


def init(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A size that `dmt recipes` lists, a hub id, or a folder with a config.json.",
            autocompletion=lambda: _SIZES,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER", help="NODESxGPUSxNAME, e.g. 4x8xh100-80gb, or a cluster file."
        ),
    ] = None,
    files: _Files = None,
    task: Annotated[
        Task | None, typer.Option(help="What to train the model for; default: pretrain.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A file to train on: text, conversations or preferences. Batch and warm-up "
            "follow from it."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: standard output.")
    ] = None,
) -> None:
    """Write a short recipe whose layout is `auto`, with the planned values in comments.

    Example: `dmt init qwen3-8b --task lora --data chats.jsonl --cluster 2xa100-80gb`

    Example: `dmt init --from axolotl.yml --cluster 8xh100-80gb --out recipe.yaml`
    """
    if files:
        _import(files, model, cluster, task, data, out)
        return
    if model is None or cluster is None:
        missing = "MODEL" if model is None else "--cluster"
        raise PlanError(
            f"{missing}: missing",
            fix="dmt init MODEL --cluster NODESxGPUSxNAME, or dmt init --from FILE",
        )
    _put(starter(model, find_cluster(cluster), cluster, task or "pretrain", data), out)


def _import(
    files: list[Path],
    model: str | None,
    cluster: str | None,
    task: Task | None,
    data: Path | None,
    out: Path | None,
) -> None:
    """Return the recipe of `--from`. Print on standard error which settings are not carried."""
    from toolkit.starter.imported import import_files

    imported = import_files(files, model, cluster, task, data)
    _put(imported.text, out)
    for line in imported.left:
        tell(f"dmt: {line}")
    if imported.problem:
        tell(f"dmt: as it is, the recipe cannot be planned: {imported.problem}")
        raise typer.Exit(EXIT_USER_ERROR)


def _put(text: str, out: Path | None) -> None:
    if out is None:
        tell(text, sys.stdout)
        return
    with out.open("x", encoding="utf-8") as new:
        new.write(f"{redact(text)}\n")
    tell(f"wrote {out}; next: dmt check {out}")
