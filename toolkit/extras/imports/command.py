"""`dmt checkpoint import`: turn another tool's checkpoint into a checkpoint of a run.

Of Megatron-LM's checkpoints only the weights are read. They become a Hugging Face folder.
"""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.manifest import FileRecord, Manifest
from toolkit.checkpoint.saver import entries_of, write_companions, write_state
from toolkit.checkpoint.shards import StateShard
from toolkit.checkpoint.store import CheckpointStore, folder_name
from toolkit.cli.progress import progress
from toolkit.data.build import build_data
from toolkit.errors import CheckpointError, DataError, DmtError
from toolkit.extras.imports import dcp, deepspeed, megatron
from toolkit.extras.imports.state import (
    ForeignState,
    RecipeModel,
    check_adamw,
    differences,
    recipe_model,
    shards_of,
)
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf
from toolkit.models.safetensors import in_files
from toolkit.plan.hardware.cluster_file import find_cluster
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.run.assignment import Assignment, check_local_files, decide, write
from toolkit.run.claim import refuse_if_claimed
from toolkit.run.directory import RunDirectory, refuse_other_run
from toolkit.run.environment import environment_report
from toolkit.text.terminal import tell
from toolkit.text.units import byte_size
from toolkit.train.exporting import companion_files, take_ends

FORMATS = (deepspeed, dcp, megatron)
"""Modules with a TITLE, the FILES by which they are recognised, and `matches`."""


def import_checkpoint(
    path: Path,
    source: Path,
    overrides: Sequence[str],
    run_dir: Path | None,
    cluster: str | None,
    to: Path | None,
) -> None:
    """Carry out the command. See its help in `cli/checkpoint.py`."""
    where = None if cluster is None else find_cluster(cluster)
    recipe = load_recipe(path, overrides, where)
    form = _format_of(source)
    if form is not megatron and to is not None:
        raise CheckpointError(f"--to: {source} is of {form.TITLE}", fix="leave --to out")
    if form is megatron:
        if to is None:
            raise CheckpointError(
                f"{source}: of Megatron-LM's checkpoints the weights alone are read",
                fix="add --to FOLDER, and train with model.hub: FOLDER, model.init: pretrained",
            )
        for note in megatron.read_megatron(source, hf.build_config(recipe.model), to):
            tell(f"note: {note}")
        tell(f"wrote {to}", sys.stdout)
        return
    assignment = decide(recipe, run_dir, where)
    run = RunDirectory(assignment.run_dir)
    _check_target(run, assignment.recipe)
    check_local_files(recipe, path, overrides)
    model = recipe_model(assignment.recipe)
    state = _read(form, source, model)
    shards = shards_of(state, model)
    consumed = state.consumed_samples
    if consumed is None:
        consumed = recipe.training.batches.samples(state.step)
    nbytes = sum(entry.nbytes for entry in entries_of(shards))
    with progress("import", nbytes, in_bytes=True) as tick:
        manifest = _write(state, shards, model, assignment, consumed, tick)
    # It names the commit of the data, which a launch would look up anew.
    write(assignment, ["dmt", *sys.argv[1:]])
    folder = run.checkpoints / folder_name(state.step)
    for note in _notes(state, consumed):
        tell(f"note: {note}")
    size = byte_size(manifest.nbytes)
    tell(f"wrote {folder}: step {state.step:,} of {form.TITLE}, {size}", sys.stdout)
    words = ["dmt", "launch", str(path), *(w for one in overrides for w in ("--set", one))]
    words += [] if cluster is None else ["--cluster", cluster]
    words += [] if run_dir is None else ["--run-dir", str(run_dir)]
    tell(f"to continue: {shlex.join(words)}")


def _format_of(source: Path) -> Any:
    """The format of a folder. Raises CheckpointError if no known tool wrote it."""
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder", fix="name a checkpoint's folder")
    for form in FORMATS:
        if form.matches(source):
            return form
    known = "; ".join(f"{form.TITLE}: {form.FILES}" for form in FORMATS)
    raise CheckpointError(
        f"{source} is not a checkpoint of a supported tool",
        fix=f"name the folder of one save; supported are {known}",
    )


def _read(form: Any, source: Path, model: RecipeModel) -> ForeignState:
    """Read the state. Any error that a malformed file causes becomes one CheckpointError."""
    try:
        state: ForeignState = form.read(source, model)
        check_adamw(state.groups)
        notes = (*differences(state.groups, model.recipe), *state.notes)
        return replace(state, notes=notes)
    except DmtError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise CheckpointError(
            f"{source} does not hold what {form.TITLE} writes ({why[:200]})",
            fix="it is damaged, or of a version that is not supported",
        ) from error


def _check_target(run: RunDirectory, recipe: Recipe) -> None:
    refuse_if_claimed(run)
    refuse_other_run(run, recipe)
    store = CheckpointStore(run.checkpoints, keep=1)
    if store.expects_one():
        raise CheckpointError(
            f"{store.folder} holds checkpoints of a run", fix="--run-dir OTHER for a new run"
        )


def _write(
    state: ForeignState,
    shards: Sequence[StateShard],
    model: RecipeModel,
    assignment: Assignment,
    samples: int,
    tick: Callable[[int], None],
) -> Manifest:
    """Write the state as the first checkpoint of the run.

    Tensors are copied one after the other. The checkpoint appears when it is complete. `tick`
    gets the bytes written. Raises CheckpointError or DataError.
    """
    recipe, plan = assignment.recipe, assignment.plan
    run = RunDirectory(assignment.run_dir)
    store = CheckpointStore(run.checkpoints, recipe.checkpoint.keep)
    data = build_data(recipe.data, recipe.training, model.config.vocab_size)
    take_ends(model.config, recipe, data)
    manifest = Manifest(
        step=state.step,
        consumed_samples=samples,
        optimizer_steps=state.optimizer_steps,
        loss_scale=None,
        recent_losses=(),
        data_fingerprint=data.fingerprint_at(samples),
        engine=plan.engine,
        model=plan.model,
        layout=plan.layout,
        recipe=jsonl.plain(recipe.model_dump(mode="json")),
        versions=environment_report(),
    )
    companions = companion_files(recipe, run, model.config, data)
    store.begin(state.step)
    folder = store.partial(state.step)
    files: dict[str, FileRecord] = {}
    entries = [entry.telling(tick) for entry in entries_of(shards)]
    try:
        for number, content in enumerate(in_files(entries).values()):
            files |= write_state(folder, number, content)
        manifest = manifest.with_files(files | write_companions(folder, companions))
        store.commit(manifest)
    except OSError as error:
        raise DataError(f"{store.folder} cannot be written: {error}") from error
    finally:
        store.abandon(state.step)
    return manifest


def _notes(state: ForeignState, consumed: int) -> Iterator[str]:
    if state.consumed_samples is None:
        yield "it does not state its samples: they are those of as many steps of the recipe"
    yield (
        f"data: continues after sample {consumed:,} of the recipe's data; which of them the "
        "other tool has seen is not in its checkpoint"
    )
    yield from state.notes
