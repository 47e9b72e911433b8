"""Writes the state of another tool as a checkpoint of a run, which continues from it."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from torch import Tensor

from toolkit.checkpoint.manifest import FileRecord, Manifest, write_synced
from toolkit.checkpoint.saver import entries_of
from toolkit.checkpoint.shards import StateShard, dtype_of, parameter_blocks, state_quantities
from toolkit.checkpoint.store import CheckpointStore, sync_folder
from toolkit.data.build import recipe_data
from toolkit.errors import CheckpointError, DataError
from toolkit.extras.imports.base import SAMPLES, ForeignState, RecipeModel, StoredTensor
from toolkit.models import huggingface as hf
from toolkit.models.frozen import matching
from toolkit.models.safetensors_stream import LARGEST_FILE_BYTES, in_files, write_file
from toolkit.models.weights import is_correction_bias
from toolkit.recipe.schema import Recipe
from toolkit.run import jsonl
from toolkit.run.assignment import Assignment
from toolkit.run.directory import RunDirectory
from toolkit.run.environment import environment_report
from toolkit.train.companions import companion_files, take_ends


class ParameterShard(StateShard):
    """A whole parameter, which is read each time a quantity is asked for."""

    in_memory = False

    def __init__(
        self, name: str, shape: Sequence[int], stored: Mapping[str, StoredTensor]
    ) -> None:
        super().__init__(parameter_blocks(name, shape), {}, saved_here=True)
        self._stored = stored

    @property
    def quantities(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def get(self, quantity: str) -> Tensor:
        return self._stored[quantity].read().detach().reshape(-1).to(dtype_of(quantity))


def recipe_model(recipe: Recipe) -> RecipeModel:
    """The model that an import must fill. Raises CheckpointError where a run of the recipe
    keeps something else than a whole model."""
    if recipe.adapter is not None:
        raise CheckpointError(
            "a run with adapters keeps only the adapters, which no other tool saves alike",
            fix="import into a recipe without `adapter`; a PEFT folder is adapter.folder",
        )
    config = hf.build_config(recipe.model)
    return RecipeModel(
        recipe, config, hf.parameter_shapes(config), hf.checkpoint_shapes(config)
    )


def shards_of(state: ForeignState, model: RecipeModel) -> list[ParameterShard]:
    """What is written. Raises CheckpointError unless the state has every parameter of the
    recipe's model, with the optimizer's states of what trains."""
    if problems := list(_problems(state, model)):
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(
            f"the checkpoint does not fit the recipe: {problems[0]}{more}",
            fix="state its model in model.config, what it froze in model.freeze, and its "
            "optimizer in optimizer.name",
        )
    return [
        ParameterShard(name, shape, state.parameters[name])
        for name, shape in model.parameters.items()
    ]


def _problems(state: ForeignState, model: RecipeModel) -> Iterator[str]:
    frozen = matching(model.recipe.model.freeze, model.tensors)
    optimizer = model.recipe.optimizer.name
    for name, shape in model.parameters.items():
        stored, expected, trains = state.parameters.get(name, {}), {"weight"}, False
        for tensor in (block.tensor for block in parameter_blocks(name, shape)):
            if tensor not in frozen and not is_correction_bias(tensor):
                expected |= {*state_quantities(optimizer, tensor, model.tensors[tensor])}
                trains = True
        if missing := sorted(expected - stored.keys()):
            yield f"it has no {', '.join(missing)} of {name}"
        elif more := sorted(stored.keys() - expected):
            why = f"{optimizer} does not keep" if trains else "model.freeze does not train"
            yield f"it has {', '.join(more)} of {name}, which {why}"
        for quantity, one in stored.items():
            if one.shape not in (shape, (prod(shape),)):
                found, needed = list(one.shape), list(shape)
                yield f"its {quantity} of {name} has the shape {found}, the model's is {needed}"
    for name in state.parameters.keys() - model.parameters.keys():
        yield f"it has {name}, which the recipe's model has not"


def cursor(state: ForeignState, recipe: Recipe, samples: int | None) -> tuple[int, str]:
    """Consumed samples where the run continues, and how they are known."""
    if samples is not None:
        if samples >= SAMPLES:
            raise CheckpointError(
                f"--samples {samples}: no run has consumed so many", fix="count sequences"
            )
        return samples, "by --samples"
    if state.consumed_samples is not None:
        return state.consumed_samples, "as the checkpoint states"
    samples = recipe.training.batches.samples(state.step)
    return samples, f"those of {state.step} steps of the recipe, as none are stated"


def write_checkpoint(
    state: ForeignState,
    shards: Sequence[StateShard],
    model: RecipeModel,
    assignment: Assignment,
    samples: int,
    tick: Callable[[int], None],
) -> Manifest:
    """Write the state into the run directory of the assignment, which exists and is claimed.

    Tensors are copied one after the other. The checkpoint appears when it is complete; `tick`
    gets the bytes written. Raises CheckpointError or DataError.
    """
    recipe, plan = assignment.recipe, assignment.plan
    run = RunDirectory(assignment.run_dir)
    store = CheckpointStore(run.checkpoints, recipe.checkpoint.keep)
    data = recipe_data(recipe, model.config.vocab_size)
    take_ends(model.config, recipe, data)
    manifest = Manifest(
        step=state.step,
        consumed_samples=samples,
        consumed_tokens=None,
        optimizer_steps=state.optimizer_steps,
        loss_scale=state.loss_scale,
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
    folder, files = store.partial(state.step), {}
    entries = [entry.telling(tick) for entry in entries_of(shards)]
    try:
        for number, content in enumerate(in_files(entries, LARGEST_FILE_BYTES)):
            name, digest = f"state-{number:05d}.safetensors", hashlib.sha256()
            write_file(folder / name, content, digest)
            files[name] = FileRecord((folder / name).stat().st_size, digest.hexdigest())
        for path, text in companions.items():
            files[path] = write_synced(folder / path, text)
        for inner in {(folder / path).parent for path in companions}:
            sync_folder(inner)
        manifest = manifest.with_files(files)
        store.commit(manifest)
    except OSError as error:
        raise DataError(f"{store.folder} cannot be written: {error}") from error
    finally:
        store.abandon(state.step)
    return manifest
