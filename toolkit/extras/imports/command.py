"""`dmt checkpoint import`: what another tool saved, as the checkpoint of a run."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

from toolkit.checkpoint.saver import entries_of
from toolkit.checkpoint.store import CheckpointStore, folder_name
from toolkit.cli.bars import byte_progress
from toolkit.cli.output import output
from toolkit.errors import CheckpointError, DmtError
from toolkit.extras.imports.base import FOREIGN, ForeignCheckpoint, ForeignState, RecipeModel
from toolkit.extras.imports.compared import differences
from toolkit.extras.imports.run import cursor, recipe_model, shards_of, write_checkpoint
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.layers import stated_in
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import Assignment, check_local_files, decide, write
from toolkit.run.claim import claimed
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog
from toolkit.text.terminal import tell
from toolkit.text.units import byte_size


def import_checkpoint(
    path: Path,
    source: Path,
    overrides: Sequence[str],
    run_dir: Path | None,
    cluster: str | None,
    samples: int | None,
    as_json: bool,
) -> None:
    """Carry out the command; see its help in `cli/checkpoint.py`."""
    form = _format_of(source)
    where = None if cluster is None else find_cluster(cluster)
    recipe = load_recipe(path, overrides, where)
    assignment = decide(recipe, run_dir, where)
    _check_target(assignment)
    check_local_files(recipe, path, overrides)
    model = recipe_model(assignment.recipe)
    state = _read(form, source, model)
    shards = shards_of(state, model)
    consumed, known = cursor(state, recipe, samples)
    notes = [*_notes(state, recipe, consumed, known)]
    nbytes = sum(entry.nbytes for entry in entries_of(shards))
    is_new = not assignment.run_dir.exists()
    run = write(assignment, ["dmt", *sys.argv[1:]], stated_in(path, overrides))
    with claimed(run), _removed_on_failure(run, is_new):
        with byte_progress("import", nbytes) as tick:
            manifest = write_checkpoint(state, shards, model, assignment, consumed, tick)
        message = f"continues from {form.title} {source}, step {state.step}"
        EventLog(run.events).write("import", step=state.step, message=message)
    folder = run.checkpoints / folder_name(state.step)
    data = {
        "folder": str(folder), "from": str(source), "format": form.title, "step": state.step,
        "consumed_samples": consumed, "bytes": manifest.nbytes, "notes": notes,
    }  # fmt: skip
    words = ["dmt", "launch", str(path), *(w for one in overrides for w in ("--set", one))]
    words += [] if cluster is None else ["--cluster", cluster]
    words += [] if run_dir is None else ["--run-dir", str(run_dir)]
    output(as_json, data, _lines(data, shlex.join(words)), wrap=False)


def _format_of(source: Path) -> ForeignCheckpoint:
    """The format of a folder. Raises CheckpointError if no known tool wrote it."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder", fix="name a checkpoint's folder")
    formats = list(FOREIGN.values())
    for form in formats:
        if form.matches(source):
            return form
    known = "; ".join(f"{form.title}: {form.files}" for form in formats)
    raise CheckpointError(
        f"{source} is not a checkpoint of a supported tool", fix=f"supported are {known}"
    )


def _read(form: ForeignCheckpoint, source: Path, model: RecipeModel) -> ForeignState:
    """The state. Whatever a malformed file makes a reader raise is one CheckpointError."""
    try:
        return form.read(source, model)
    except DmtError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"{source} does not hold what {form.title} writes ({why[:200]})",
            fix="it is damaged, or of a version that is not supported",
        ) from error


def _check_target(assignment: Assignment) -> None:
    store = CheckpointStore(RunDirectory(assignment.run_dir).checkpoints, keep=1)
    if assignment.recipe.checkpoint.resume == "never":
        raise CheckpointError(
            "checkpoint.resume is never: the run would not continue from what is imported",
            fix="set checkpoint.resume: auto",
        )
    if store.expects_one():
        raise CheckpointError(
            f"{store.folder} holds checkpoints of a run", fix="--run-dir OTHER for a new run"
        )


@contextmanager
def _removed_on_failure(run: RunDirectory, is_new: bool) -> Iterator[None]:
    """Remove a run directory that this command has made if nothing is imported into it: a
    launch would otherwise train from the recipe's own start."""
    try:
        yield
    except BaseException:
        if is_new:
            rmtree(run.path, ignore_errors=True)
        raise


def _notes(state: ForeignState, recipe: Recipe, consumed: int, known: str) -> Iterator[str]:
    yield (
        f"data: continues after sample {consumed:,} of the recipe's data, {known}; which of "
        "them the other tool has seen is not in its checkpoint"
    )
    total = recipe.total_steps()
    if total is not None and state.step >= total:
        yield f"step {state.step:,} of {total:,}: nothing is left to train"
    planned = total and total * recipe.training.global_batch_size
    if planned is not None and consumed > planned:
        yield f"{consumed:,} samples are more than the {planned:,} of the recipe's whole run"
    yield from differences(state.settings, recipe)
    yield from state.notes


def _lines(data: Mapping[str, Any], launch: str) -> Iterator[str]:
    for note in data["notes"]:
        tell(f"note: {note}")
    size = byte_size(data["bytes"])
    yield f"wrote {data['folder']}: step {data['step']:,} of {data['format']}, {size}"
    tell(f"to continue: {launch}")
