"""`dmt checkpoint`: list, verify, convert, export and import checkpoints."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.text import Text

from toolkit.checkpoint.checkpoints import (
    CHECKPOINTS,
    CheckpointFolder,
    ListEntry,
    list_checkpoints,
    locate,
    store_of,
)
from toolkit.cli.bars import byte_progress
from toolkit.cli.extras import option
from toolkit.cli.options import AsJson, ClusterOption, Overrides, RecipePath, RunDir
from toolkit.cli.output import Hanging, Line, Table, output
from toolkit.errors import EXIT_DONE, EXIT_USER_ERROR, CheckpointError
from toolkit.intake.load import load_recipe
from toolkit.plan.dimensions import degrees_text
from toolkit.run.directory import RunDirectory
from toolkit.text.terminal import tell
from toolkit.text.units import byte_size

if TYPE_CHECKING:
    from toolkit.checkpoint.verify import VerificationResult
    from toolkit.train.fits import StateRow

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="List, verify, convert, export and import checkpoints.\n\n"
    "CKPT is a step-… folder; for a run directory or its checkpoints folder, the newest "
    "finished checkpoint is meant.\n\n"
    "Example: `dmt checkpoint list runs/tiny-llama-bytes`",
)

Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="CKPT", help="A checkpoint, or a run for its newest checkpoint."),
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Folder to write, new.")]
_COLOURS = {
    "finished": "green", "damaged": "red", "unfinished": "yellow",
    "kept": "green", "changed": "yellow", "refused": "red",
}  # fmt: skip


@app.command("list")
def list_(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_FOLDER", help="Run directory, or its checkpoints.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run, including damaged and unfinished ones.

    Reads manifests and file sizes only; `dmt checkpoint verify` hashes the files.

    Example: `dmt checkpoint list runs/tiny-llama-bytes`
    """
    store = store_of(path)
    found = list_checkpoints(store)
    if not found and not as_json:
        tell(f"{store.folder} holds no checkpoints")
        for replica in RunDirectory(path).replicas:
            tell(f"{replica} is a run of its own: name that one")
        return
    data = {"folder": str(store.folder), "checkpoints": [*map(_listed, found)]}
    output(as_json, data, _list_lines(found))


def _list_lines(found: Sequence[ListEntry]) -> Iterator[Line]:
    for row, line in _LIST.coloured(found, lambda row: (row.state, _COLOURS[row.state])):
        yield line
        if row is not None and row.problem:
            yield Hanging(Text("    "), row.problem)


def _listed(one: ListEntry) -> dict[str, Any]:
    manifest = one.manifest
    known = {} if manifest is None else {
        "step": manifest.step,
        "engine": manifest.engine,
        "model": manifest.model,
        "layout": manifest.layout.to_dict(),
    }  # fmt: skip
    return {
        "folder": one.folder.name,
        **known,
        "written": _time(one.modified_s).isoformat(),
        "bytes": one.nbytes,
        "state": one.state,
        "problem": one.problem or None,
        "latest": one.latest,
    }


def _step(row: ListEntry) -> str:
    name = row.name.removeprefix("step-").lstrip("0") or "0"
    return name if row.name == row.folder.name else f"{name} ({row.folder.name})"


def _layout(row: ListEntry) -> str:
    saved = row.manifest
    return "" if saved is None else degrees_text(saved.engine, saved.model, saved.layout)


_LIST = Table[ListEntry](
    {
        "step": _step,
        "written": lambda row: f"{_time(row.modified_s):%Y-%m-%d %H:%M}",
        "size": lambda row: byte_size(row.nbytes),
        "state": lambda row: f"{row.state}, latest" if row.latest else row.state,
        "layout": _layout,
    },
    left=5,
)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()


@app.command()
def verify(checkpoint: Checkpoint, as_json: AsJson = False) -> None:
    """Hash every file, and check that each element of each tensor is stored exactly once.

    Reports every problem, and then exits with 2.

    Example: `dmt checkpoint verify runs/tiny-llama-bytes`
    """
    from toolkit.checkpoint.verify import verify as check

    found = _find(checkpoint)
    with byte_progress("verify", found.manifest.nbytes) as tick:
        verified = check(found.folder, tick)
    data = {"folder": str(found.folder), "ok": not verified.problems, **asdict(verified)}
    code = EXIT_USER_ERROR if verified.problems else EXIT_DONE
    output(as_json, data, _verified_lines(found, verified), wrap=False, exit_code=code)


def _verified_lines(found: CheckpointFolder, verified: "VerificationResult") -> Iterator[str]:
    """What is wrong goes to standard error."""
    for note in verified.notes:
        tell(f"note: {note}")
    for problem in verified.problems:
        tell(f"✗ {problem}")
    files, size = len(found.manifest.files), byte_size(found.manifest.nbytes)
    if count := len(verified.problems):
        tell(f"{found.folder} is damaged: {count} problem{'s' * (count > 1)}")
        return
    yield f"{found.folder} is whole: {files} files, {size}; every element is there exactly once"


@app.command()
def inspect(
    checkpoint: Checkpoint,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="List every tensor with its shape and pieces.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show what a checkpoint holds: step, layout, precision, versions, tensors.

    Example: `dmt checkpoint inspect runs/tiny-llama-bytes --tensors`
    """
    from toolkit.cli.checkpoint_tables import TENSORS, contents, facts

    found = _find(checkpoint)
    held = contents(found.folder)
    data = {"folder": str(found.folder), **asdict(found.manifest)}
    data["layout"] = found.manifest.layout.to_dict()
    if tensors:
        data["tensors"] = {tensor.name: tensor._asdict() for tensor in held}

    def lines() -> Iterator[Line]:
        yield Text(str(found.folder), "bold", no_wrap=True)
        for name, text in facts(found.manifest, held):
            yield Hanging(Text(f"  {name:<12} ", "dim"), text)
        if tensors:
            yield from (f"  {line}" for line in TENSORS.lines(held))

    output(as_json, data, lines(), wrap=False)


@app.command()
def convert(checkpoint: Checkpoint, dst: Destination, as_json: AsJson = False) -> None:
    """Write the same checkpoint with whole tensors, in files of at most 5 GB.

    Runs continue from it as from the original, and every tool that reads safetensors can
    read it. Both are verified. A few rows of one tensor are in memory at a time.

    Example: `dmt checkpoint convert runs/tiny-llama-bytes archive/step-00000200`
    """
    from toolkit.checkpoint import convert as conversion
    from toolkit.checkpoint.saved_state import SavedState
    from toolkit.checkpoint.verify import require_whole

    found = _find(checkpoint)
    nbytes = found.manifest.nbytes
    conversion.check_target(found.folder, dst, nbytes)
    # New hashes are written: damage must not become part of a good checkpoint.
    with byte_progress("verify", nbytes) as tick:
        require_whole(found.folder, tick)
    with byte_progress("convert", SavedState(found.folder).nbytes) as tick:
        manifest = conversion.convert(found.folder, dst, tick)
    with byte_progress("verify", manifest.nbytes) as tick:
        require_whole(dst, tick)
    _wrote(dst, found, {"files": len(manifest.files), "bytes": manifest.nbytes}, as_json)


_CompareLogits = Annotated[
    Literal["transformers", "vllm"] | None,
    typer.Option(
        "--compare-logits",
        help="Compare the export, as transformers (or PEFT) or vLLM load it, with the trained "
        "model; needs room for two in fp32.",
    ),
]
_ShardSize = Annotated[
    str | None,
    typer.Option(help="Largest file of weights, e.g. 500MB or 2GiB; 5GB if not stated."),
]
_Verify = Annotated[
    bool,
    typer.Option(" /--no-verify", help="Do not hash the checkpoint first.", show_default=False),
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
_PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="REPO",
        help="Upload the export to this model repository, which is created if needed.",
    ),
]
_Private = Annotated[
    bool, typer.Option("--private", help="With --push-to-hub: only to a private one.")
]


@app.command()
def export(
    checkpoint: Checkpoint,
    dst: Destination,
    verify: _Verify = True,
    merged: _Merged = False,
    compare: _CompareLogits = None,
    shard_size: _ShardSize = None,
    to: _To = "huggingface",
    push_to_hub: _PushToHub = None,
    private: _Private = False,
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face folder: config, tokenizer, sharded safetensors and a model card.

    For a run with adapters, a PEFT folder: `adapter_model.safetensors`, `adapter_config.json`.

    Example: `dmt checkpoint export runs/tiny-llama-bytes model`
    """
    from toolkit.checkpoint import export as exporting
    from toolkit.checkpoint import logits
    from toolkit.checkpoint.hub_upload import HubRepository
    from toolkit.models.new_folder import check_destination
    from toolkit.run.model_card import is_generated, write_card

    if to != "huggingface" and (checkpoint / "config.json").is_file():
        _to_megatron(checkpoint, dst)
        output(as_json, {"folder": str(dst), "from": str(checkpoint)}, [f"wrote {dst}"])
        return
    found = _find(checkpoint)
    limit = {} if shard_size is None else {"shard_bytes": _shard_bytes(shard_size)}
    if private and push_to_hub is None:
        raise CheckpointError("--private: nothing is uploaded", fix="add --push-to-hub REPO")
    if to != "huggingface" and (shard_size or compare or push_to_hub):
        raise CheckpointError("--to megatron: not with options of a Hugging Face folder")
    if found.manifest.adapter is not None and not merged:
        _refuse_for_adapters(shard_size, compare, to)
    if compare is not None:
        logits.require(compare)
    nbytes = exporting.exported_bytes(found.folder, merged=merged)
    check_destination(found.folder, dst, nbytes)
    repository = push_to_hub and HubRepository.prepare(push_to_hub, private=private)
    if verify:
        _verify_first(found)
    with byte_progress("export", nbytes) as tick:
        if to != "huggingface":
            _run_to_megatron(found, dst, merged)
        else:
            exporting.export(found.folder, dst, tick, merged=merged, **limit)
            write_card(dst, found.folder)
    report: dict[str, Any] = {"bytes": nbytes, "verified": verify}
    if compare is not None:
        report["logits"] = logits.compare(found.folder, dst, compare)
    if repository:
        message = (
            f"Step {found.manifest.step:,} of {found.manifest.recipe.get('name', 'a run')}"
        )
        report["commit"] = repository.upload(dst, message, is_generated)
    _wrote(dst, found, report, as_json)


def _verify_first(found: CheckpointFolder) -> None:
    from toolkit.checkpoint.verify import require_whole

    tell("verifying the checkpoint first (--no-verify leaves that out)")
    with byte_progress("verify", found.manifest.nbytes) as tick:
        require_whole(found.folder, tick)


def _run_to_megatron(found: CheckpointFolder, dst: Path, merged: bool) -> None:
    """By way of a Hugging Face folder next to it."""
    from toolkit.checkpoint.export import export as export_folder

    parent = dst.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=parent, prefix=".export-") as temporary:
        export_folder(found.folder, Path(temporary) / "hf", merged=merged)
        _to_megatron(Path(temporary) / "hf", dst)


def _to_megatron(source: Path, dst: Path) -> None:
    from toolkit.models.new_folder import appearing, check_destination

    check_destination(
        source, dst, sum(one.stat().st_size for one in source.glob("*.safetensors"))
    )
    with appearing(dst) as folder:
        option("checkpoint export --to megatron")(source, folder)


def _refuse_for_adapters(shard_size: str | None, compare: str | None, to: str) -> None:
    """Raise CheckpointError for options that need a whole model."""
    if to != "huggingface":
        raise CheckpointError("--to megatron: it is a whole model", fix="add --merged")
    if shard_size is not None:
        fix = "remove --shard-size, or add --merged"
        raise CheckpointError("--shard-size: adapters are one file", fix=fix)
    if compare == "vllm":
        raise CheckpointError(
            "--compare-logits vllm: it loads whole models", fix="add --merged"
        )


def _shard_bytes(text: str) -> int:
    """Bytes of a size in transformers' words for `max_shard_size`."""
    from accelerate.utils import convert_file_size_to_int

    try:
        found = int(convert_file_size_to_int(text))
    except ValueError:
        found = 0
    if found <= 0:
        said = f"--shard-size: found {text!r}, allowed is a number with KB, MB, GB, MiB or GiB"
        raise CheckpointError(said, fix="write e.g. --shard-size 2GB")
    return found


def _wrote(dst: Path, found: CheckpointFolder, written: dict[str, Any], as_json: bool) -> None:
    manifest, size = found.manifest, byte_size(written["bytes"])
    data = {"folder": str(dst), "from": str(found.folder), "step": manifest.step}
    lines = [f"wrote {dst}: step {manifest.step:,} of {found.folder}, {size}"]
    if "logits" in written:
        lines.append(str(written["logits"]))
    if "commit" in written:
        lines.append(f"uploaded: {written['commit']}")
    output(as_json, data | written, lines, wrap=False)


@app.command()
def fits(
    recipe: RecipePath,
    checkpoint: Checkpoint,
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    cluster: ClusterOption = None,
    as_json: AsJson = False,
) -> None:
    """Show what a run would keep of a checkpoint, before it is launched.

    Exits with 2 when the recipe cannot continue from it. Starts and writes nothing.

    Example: `dmt checkpoint fits recipes/tiny/llama-bytes.yaml runs/tiny-llama-bytes --set
    parallel.zero.stage=3`
    """
    from toolkit.hardware.cluster_file import find_cluster
    from toolkit.run.assignment import decide
    from toolkit.train.fits import compare

    where = None if cluster is None else find_cluster(cluster)
    assignment = decide(load_recipe(recipe, overrides, where), None, where)
    found = _find(checkpoint)
    rows = compare(found, assignment)
    refused = any(row.verdict == "refused" for row in rows)
    parts = [row._asdict() for row in rows]
    data = {"folder": str(found.folder), "fits": not refused, "parts": parts}
    verdict = f"{recipe} {'does not fit' if refused else 'fits'} {found.folder}"
    code = EXIT_USER_ERROR if refused else EXIT_DONE
    output(as_json, data, [*_fit_lines(rows), verdict], wrap=False, exit_code=code)
    if not as_json:
        launch = [str(recipe), *(word for one in overrides for word in ("--set", one))]
        launch += [] if cluster is None else ["--cluster", cluster]
        tell(_how_to_go_on(found, launch))


def _fit_lines(rows: "Sequence[StateRow]") -> Iterator[Hanging]:
    width = max(len(row.what) for row in rows)
    for row in rows:
        verdict = (f"{row.verdict:<8} ", _COLOURS[row.verdict])
        prefix = Text.assemble(verdict, (f"{row.what:<{width}}  ", "bold"))
        yield Hanging(prefix, row.why)


def _how_to_go_on(found: CheckpointFolder, launch: Sequence[str]) -> str:
    if found.folder.absolute().parent.name != CHECKPOINTS:
        return "copy it into the checkpoints folder of a run directory to continue from it"
    run = found.folder.absolute().parent.parent
    newest = store_of(run).finished()[-1].name
    if newest != found.folder.name:
        return f"a launch continues from the newest, {newest}, unless that is removed"
    return f"to continue: {shlex.join(['dmt', 'launch', *launch, '--run-dir', str(run)])}"


@app.command("import")
def import_(
    recipe: RecipePath,
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="Checkpoint folder of another tool.")
    ],
    overrides: Overrides = [],  # noqa: B006 - typer's way to say "may be repeated"
    run_dir: RunDir = None,
    cluster: ClusterOption = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Continue after N sequences of the recipe's data; default: as the checkpoint "
            "states, else its steps × training.global_batch_size.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what another tool saved as a checkpoint of the recipe's run, which `dmt launch`
    continues: fp32 weights, AdamW's moments, step, place in the schedule and data.

    SOURCE is a universal checkpoint of DeepSpeed or one of torch.distributed.checkpoint; of
    Megatron-LM's torch_dist the weights alone are read. No code of the files runs.

    Example: `dmt checkpoint import RECIPE output/global_step500_universal`
    """
    option("checkpoint import")(recipe, source, overrides, run_dir, cluster, samples, as_json)


def _find(path: Path) -> CheckpointFolder:
    """The checkpoint of a path; prints which it is where the path names a run."""
    found = locate(path)
    if found.newest_of is not None:
        tell(f"{found.folder.name} is the newest finished checkpoint of {found.newest_of}")
    return found
