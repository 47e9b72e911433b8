"""`dmt eval`: judge a run, a checkpoint or a Hugging Face folder by tasks and samples."""

import fcntl
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from toolkit.checkpoint.checkpoints import CHECKPOINTS, CheckpointFolder, locate
from toolkit.checkpoint.manifest import Manifest
from toolkit.cli.bars import byte_progress
from toolkit.cli.options import AsJson
from toolkit.cli.output import output
from toolkit.errors import DataError, DirectoryInUse
from toolkit.evaluator import EVALUATORS, EvaluatorSection, chosen
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.run.claim import refuse_if_claimed
from toolkit.run.directory import RunDirectory
from toolkit.run.evaluations import Recorded, described, record
from toolkit.run.events import EventLog
from toolkit.run.model_card import refresh_card
from toolkit.text.terminal import tell
from toolkit.track.service import TrackerFollower
from toolkit.track.trackers import wanted

TRACKER_WAIT_S = 120.0
"""How long each tracker may take to post the numbers."""
_WORK = ".export-of-dmt-eval"
_LOCK = "lock"


@dataclass(frozen=True)
class Judged:
    """What a path names."""

    folder: Path | None = None
    """A Hugging Face folder."""
    checkpoint: CheckpointFolder | None = None
    run: RunDirectory | None = None
    """The run of the checkpoint, if it is in one."""

    @classmethod
    def of(cls, path: Path) -> "Judged":
        """Raises CheckpointError for a path that is none of them."""
        if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
            return cls(folder=path)
        found = locate(path)
        run = RunDirectory(found.folder.absolute().parent.parent)
        inside = found.folder.absolute().parent.name == CHECKPOINTS and run.recipe.is_file()
        return cls(checkpoint=found, run=run if inside else None)

    @property
    def recipe(self) -> Recipe | None:
        """The run's."""
        return None if self.run is None else load_recipe(self.run.recipe)


def eval_(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|FOLDER", help="A run, a checkpoint, or a Hugging Face folder."
        ),
    ],
    tasks: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="Of the harness, separated by commas."),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(help="Folder with YAMLs of your own tasks.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task.")] = None,
    few_shot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples in each prompt.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples computed at once.")] = 8,
    prompts: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A text to complete.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Of each completion.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Ask in the chat template.")] = False,
    device: Annotated[
        str, typer.Option(metavar="auto|cpu|cuda", help="auto: the run's; a GPU for a folder.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate exported weights, or those of a checkpoint, in a process of its own.

    Without --tasks and --prompt: what the run's recipe states in `evaluation`. The findings
    about a run are written into RUN/evaluations, and to its trackers.

    Example: `dmt eval runs/tiny-llama-bytes --tasks arc_easy,my_task --include-path tasks`
    """
    judged = Judged.of(path)
    stated: dict[str, dict[str, Any]] = {}
    if names := [name for text in tasks or () for name in text.split(",") if name]:
        folder = None if include_path is None else str(include_path.absolute())
        stated["tasks"] = {
            "names": names, "include_path": folder, "limit": limit, "few_shot": few_shot,
            "batch": batch_size, "chat": chat,
        }  # fmt: skip
    if prompts:
        stated["samples"] = {"prompts": prompts, "max_tokens": max_tokens, "chat": chat}
    if "" in (prompts or ()):
        raise DataError("--prompt: it is empty", fix="state a text to complete")
    settings = {n: EVALUATORS[n].section.model_validate(one) for n, one in stated.items()}
    recipe = judged.recipe
    if not settings and recipe is not None:
        settings = chosen(recipe.evaluation)
    if not settings:
        raise DataError("nothing to evaluate", fix="add --tasks NAMES, or --prompt TEXT")
    findings = _judge(judged, settings, device_of(device, recipe))
    found = judged.checkpoint
    step = {} if found is None else {"step": found.manifest.step}
    data = {"folder": str(path), **step, "findings": jsonl.plain(findings)}
    lines = (line for n, one in findings.items() for line in described(Recorded(n, 0, {}, one)))
    output(as_json, data, lines, wrap=False)


def device_of(stated: str, recipe: Recipe | None) -> str:
    """`cpu` or `cuda`: as stated, else that of the recipe. Raises DataError."""
    if stated not in ("auto", "cpu", "cuda"):
        raise DataError(f"--device: found {stated}, allowed are auto, cpu and cuda")
    import torch

    here = torch.cuda.is_available()
    if stated == "cuda" and not here:
        raise DataError("--device cuda: torch finds no GPU here", fix="leave it out")
    if stated != "auto":
        return stated
    on_gpu = recipe is None or recipe.cluster.gpu != "cpu"
    if recipe is not None and on_gpu and not here:
        tell(f"cluster.gpu is {recipe.cluster.gpu}, torch finds no GPU here: on the CPU")
    return "cuda" if on_gpu and here else "cpu"


def _judge(
    judged: Judged, settings: Mapping[str, EvaluatorSection], device: str
) -> dict[str, Any]:
    from toolkit.evaluate.evaluation import evaluate

    with exported_folder(judged) as folder:
        findings = evaluate(folder, settings, device)
    if judged.run is not None and judged.checkpoint is not None:
        manifest = judged.checkpoint.manifest
        _record(judged.run, manifest, settings, findings)
        refresh_card(judged.run, manifest.step, judged.checkpoint.folder)
    return findings


@contextmanager
def exported_folder(judged: Judged) -> Iterator[Path]:
    """The Hugging Face folder; of a checkpoint, a temporary export on the same disk."""
    if judged.checkpoint is None:
        assert judged.folder is not None
        yield judged.folder.absolute()
        return
    from toolkit.checkpoint.export import exported_bytes
    from toolkit.checkpoint.verify import require_whole
    from toolkit.evaluate.evaluation import exported

    checkpoint, manifest = judged.checkpoint.folder, judged.checkpoint.manifest
    tell(f"step {manifest.step:,}: {checkpoint}")
    with byte_progress("verify", manifest.nbytes) as tick:
        require_whole(checkpoint, tick)
    work = judged.run.evaluations if judged.run else checkpoint.absolute().parent
    nbytes = exported_bytes(checkpoint, merged=manifest.adapter is not None)
    with _temporary(work) as own, ExitStack() as stack:
        with byte_progress("export", nbytes) as tick:
            folder = stack.enter_context(exported(checkpoint, own / "export", tick))
        yield folder


@contextmanager
def _temporary(work: Path) -> Iterator[Path]:
    """A new folder in `work`, removed at the end; those that a kill has left are removed."""
    work.mkdir(parents=True, exist_ok=True)
    for left in work.glob(f"{_WORK}-*/{_LOCK}"):
        with suppress(OSError), left.open("r+") as file:  # locked by a process that lives
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    with TemporaryDirectory(prefix=f"{_WORK}-", dir=work) as name:
        unnamed = Path(name) / f"{_LOCK}.new"
        with unnamed.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            unnamed.rename(Path(name) / _LOCK)  # locked before anyone can take it for left
            yield Path(name)


def _record(
    run: RunDirectory,
    manifest: Manifest,
    settings: Mapping[str, EvaluatorSection],
    findings: Mapping[str, Any],
) -> None:
    """Write the findings into the run, and post them where its trackers are."""
    for name, found in findings.items():
        stated = settings[name].model_dump(mode="json")
        recorded = Recorded(name, manifest.step, stated, found)
        record(run, EVALUATORS[name].event, recorded, afterwards=True)
    try:
        refuse_if_claimed(run)
    except DirectoryInUse:
        return  # it still runs, and its trackers follow its events
    recipe, events = load_recipe(run.recipe), EventLog(run.events)
    followers = [
        TrackerFollower(run, name, one, recipe.name, events)
        for name, one in wanted(recipe.logging)
    ]
    for follower in followers:
        follower.end()
    for follower in followers:
        if line := follower.finish(TRACKER_WAIT_S):
            tell(line)
