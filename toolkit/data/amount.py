"""Does the data suffice for the batch and the schedule? Asked before anything is started."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from toolkit.data.files import find_files
from toolkit.data.listing import local_files
from toolkit.data.tokenizers import BYTES, count_tokens
from toolkit.errors import BackendUnavailable, DataError, Problem, RecipeError
from toolkit.intake.checks import steps_with
from toolkit.recipe.places import is_remote
from toolkit.recipe.schema import MegatronSource, Recipe, TextSource

LARGEST_BYTES = 8 * 2**20
"""Larger data is not tokenised for this: a few seconds, and it hardly ever has too little."""
BYTES_PER_TOKEN = 16
"""More than that no usual tokenizer and format of rows have."""


def amount_problems(recipe: Recipe) -> Iterator[Problem]:
    """A batch larger than the data, and a schedule longer than what an epoch of it allows.

    Small local data only, which is tokenised for it and forgotten; what else is wrong with it
    is found when it is built.
    """
    samples = None
    if _may_lack(recipe):
        with suppress(DataError, BackendUnavailable):
            samples = count_samples(recipe)
    if samples is None:
        return
    batch = recipe.training.global_batch_size
    if samples < batch:
        fitting = _fitting_batch(recipe, samples)
        yield Problem(
            "training.global_batch_size",
            f"{batch}, with training data of {samples} samples",
            f"at most {samples}",
            f"set it to {fitting}, or use more data" if fitting else "use more data",
        )
        if not fitting:
            return
        recipe = recipe.with_values({"training.global_batch_size": fitting})
    try:
        steps_with(recipe, samples)
    except RecipeError as error:
        yield from error.problems


def count_samples(recipe: Recipe) -> int | None:
    """Samples of the training data, tokenised for it and forgotten.

    None if it is streamed, remote, larger than LARGEST_BYTES or a blend, or if its tokenizer is
    not here. Raises DataError for data that cannot be built, BackendUnavailable if a package
    that reads it is missing.
    """
    if _local_bytes(recipe) is None:
        return None
    name = recipe.data.tokenizer
    if name != BYTES and count_tokens(name, Path.cwd()) is None:
        return None
    from toolkit.data.build import recipe_data  # numpy and tokenizers

    one = {"training.global_batch_size": 1, "training.batch_ramp": None}
    with TemporaryDirectory() as cache:
        recipe = recipe.with_values({"data.cache": cache, **one})
        return recipe_data(recipe, recipe.model.stated_vocabulary).samples_per_epoch


def _may_lack(recipe: Recipe) -> bool:
    """Whether the data is so small that it may not fill a batch, or the warm-up in epochs."""
    nbytes, training = _local_bytes(recipe), recipe.training
    steps = 1 if training.epochs is None else max(1, recipe.schedule.warmup_steps)
    samples = steps * training.global_batch_size
    return nbytes is not None and nbytes <= BYTES_PER_TOKEN * samples * training.sequence_length


def _local_bytes(recipe: Recipe) -> int | None:
    """Bytes of the training data's files; None if it is not one source of small local files."""
    source = recipe.data.train
    if (
        isinstance(source, tuple | MegatronSource)
        or recipe.data.streaming is not None
        or len(recipe.trained_lengths) > 1
        or any(map(is_remote, source.places))
    ):
        return None
    files: list[Path] = []
    with suppress(DataError):  # reported with the other problems of files
        if isinstance(source, TextSource):
            files = find_files(source.files, Path.cwd(), source.exclude)
        else:
            files = local_files(source, Path.cwd()) or []
    nbytes = sum(file.stat().st_size for file in files)
    return nbytes if files and nbytes <= LARGEST_BYTES else None


def _fitting_batch(recipe: Recipe, samples: int) -> int:
    """The largest batch of so many samples that all ranks share; 0 if there is none."""
    micro = recipe.training.micro_batch_size
    unit = recipe.cluster.world_size * (micro if isinstance(micro, int) else 1)
    return samples // unit * unit
