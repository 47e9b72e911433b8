"""`dmt checkpoint`: list, verify, export and import checkpoints."""

import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer

from toolkit.checkpoint.checkpoints import (
    CheckpointFolder,
    ListEntry,
    list_checkpoints,
    locate,
    store_of,
)
from toolkit.cli.options import ClusterOption, Overrides, RecipePath, RunDir
from toolkit.cli.output import Table, show
from toolkit.cli.progress import progress
from toolkit.errors import EXIT_USER_ERROR, CheckpointError
from toolkit.plan.dimensions import degrees_text
from toolkit.registry import load
from toolkit.text.terminal import tell
from toolkit.text.units import byte_size

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="List, verify, export and import checkpoints.\n\n"
    "CKPT is a step-… folder; for a run directory or its checkpoints folder, the newest "
    "finished checkpoint is meant.\n\n"
    "Example: `dmt checkpoint list runs/tiny-llama-bytes`",
)

Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CKPT", help="A checkpoint, or a run for its newest checkpoint."),
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write, new.")]
_IMPORT = "toolkit.extras.imports.command:import_checkpoint"
_MEGATRON = "toolkit.extras.imports.megatron:write_megatron"
_COLOURS = {"finished": "green", "damaged": "red", "unfinished": "yellow"}


@app.command("list")
def list_(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="Run directory, or its checkpoints.")
    ],
) -> None:
    """List the checkpoints of a run, including damaged and unfinished ones.

    Reads manifests and file sizes only; `dmt checkpoint verify` hashes the files.

    Example: `dmt checkpoint list runs/tiny-llama-bytes`
    """
    store = store_of(path)
    found = list_checkpoints(store)
    if found:
        show(_LIST.lines(found, lambda row: _COLOURS[row.state]))
    else:
        tell(f"{store.folder} holds no checkpoints")


def _step(row: ListEntry) -> str:
    return row.folder.name.removeprefix("step-").lstrip("0") or "0"


def _layout(row: ListEntry) -> str:
    saved = row.manifest
    return "" if saved is None else degrees_text(saved.engine, saved.model, saved.layout)


_LIST = Table[ListEntry](
    {
        "step": _step,
        "written": lambda row: f"{datetime.fromtimestamp(row.modified_s):%Y-%m-%d %H:%M}",
        "size": lambda row: byte_size(row.nbytes),
        "state": lambda row: f"{row.state}, latest" if row.latest else row.state,
        "layout": _layout,
    },
    left=5,
    remark=lambda row: row.problem,
)


@app.command()
def verify(checkpoint: Checkpoint) -> None:
    """Hash every file, and check that each element of each tensor is stored exactly once.

    Reports every problem, and then exits with 2.

    Example: `dmt checkpoint verify runs/tiny-llama-bytes`
    """
    from toolkit.checkpoint.verify import verify as check

    found = _find(checkpoint)
    with progress("verify", found.manifest.nbytes, in_bytes=True) as tick:
        verified = check(found.folder, tick)
    for note in verified.notes:
        tell(f"note: {note}")
    for problem in verified.problems:
        tell(f"✗ {problem}")
    if count := len(verified.problems):
        tell(f"{found.folder} is damaged: {count} problem{'s' * (count > 1)}")
        raise typer.Exit(EXIT_USER_ERROR)
    files, size = len(found.manifest.files), byte_size(found.manifest.nbytes)
    whole = f"{found.folder} is whole: {files} files, {size}"
    tell(f"{whole}; every element is there exactly once", sys.stdout)


_NoVerify = Annotated[
    bool, typer.Option("--no-verify", help="Do not hash the checkpoint first.")
]
_Merged = Annotated[
    bool,
    typer.Option("--merged", help="Add the adapters to their base: write a whole model."),
]
_To = Annotated[
    Literal["huggingface", "megatron"],
    typer.Option(
        help="megatron: a checkpoint that Megatron-LM loads in any layout (torch_dist); CKPT "
        "may also be a Hugging Face folder. Needs memory for the whole model.",
    ),
]


@app.command()
def export(
    checkpoint: Checkpoint,
    dst: Destination,
    no_verify: _NoVerify = False,
    merged: _Merged = False,
    to: _To = "huggingface",
) -> None:
    """Write a Hugging Face folder: config, tokenizer, sharded safetensors and a model card.

    For a run with adapters, a PEFT folder: `adapter_model.safetensors`, `adapter_config.json`.

    Example: `dmt checkpoint export runs/tiny-llama-bytes model`
    """
    from toolkit.checkpoint import export as exporting
    from toolkit.checkpoint.verify import require_whole
    from toolkit.models.new_folder import check_destination
    from toolkit.run.model_card import write_card

    megatron = to != "huggingface"
    if megatron and (checkpoint / "config.json").is_file():
        load(_MEGATRON)(checkpoint, dst)
        tell(f"wrote {dst}", sys.stdout)
        return
    found = _find(checkpoint)
    manifest = found.manifest
    if megatron and manifest.adapter is not None and not merged:
        raise CheckpointError("--to megatron: it is a whole model", fix="add --merged")
    nbytes = exporting.exported_bytes(found.folder, merged=merged)
    check_destination(found.folder, dst, nbytes)
    if not no_verify:
        tell("verifying the checkpoint first (--no-verify leaves that out)")
        with progress("verify", manifest.nbytes, in_bytes=True) as tick:
            require_whole(found.folder, tick)
    with progress("export", nbytes, in_bytes=True) as tick:
        if megatron:
            _to_megatron(found.folder, dst, tick, merged)
        else:
            exporting.export(found.folder, dst, tick, merged=merged)
            write_card(dst, found.folder)
    size = byte_size(nbytes)
    tell(f"wrote {dst}: step {manifest.step:,} of {found.folder}, {size}", sys.stdout)


def _to_megatron(folder: Path, dst: Path, tick: Callable[[int], None], merged: bool) -> None:
    """Export to Megatron's format through a Hugging Face folder next to it."""
    from toolkit.checkpoint.export import export as export_folder

    parent = dst.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=".export-") as temporary:
        whole = Path(temporary) / "hf"
        export_folder(folder, whole, tick, merged=merged)
        load(_MEGATRON)(whole, dst)


@app.command("import")
def import_(
    recipe: RecipePath,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Checkpoint folder of another tool.")
    ],
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    run_dir: RunDir = None,
    cluster: ClusterOption = None,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="For Megatron-LM's torch_dist: write its weights as a Hugging Face folder.",
        ),
    ] = None,
) -> None:
    """Write what another tool saved as a checkpoint of the recipe's run, which `dmt launch`
    continues: fp32 weights, AdamW's moments, step, place in the schedule and data.

    SOURCE is a universal checkpoint of DeepSpeed or one of torch.distributed.checkpoint; of
    Megatron-LM's torch_dist the weights alone are read (`--to`). No code of the files runs.

    Example: `dmt checkpoint import RECIPE output/global_step500_universal`
    """
    load(_IMPORT)(recipe, source, overrides, run_dir, cluster, to)


def _find(path: Path) -> CheckpointFolder:
    """Find the checkpoint of a path. If the path names a run, print which one it is."""
    found = locate(path)
    if found.newest_of is not None:
        tell(f"{found.folder.name} is the newest finished checkpoint of {found.newest_of}")
    return found
