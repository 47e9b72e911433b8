"""`dmt data`: tokenise ahead of a run, look at samples."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from toolkit.cli.options import AsJson, Overrides, RecipePath
from toolkit.cli.output import output
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from toolkit.data.build import TrainingData
    from toolkit.data.packing import StreamSamples

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Prepare training data, and show it."
)


@app.command(epilog="Example: dmt data prepare llama-bytes")
def prepare(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Tokenise the recipe's data into the cache, and print its size."""
    summary = _prepare(load_recipe(recipe, overrides))
    output(as_json, summary, _prepared(summary), wrap=False)


@dataclass(frozen=True)
class _Side:
    """Size of the training or the validation data."""

    documents: int
    tokens: int
    samples: int
    tokens_per_epoch: int
    """Tokens that are fed to the model in one pass: samples times sequence length."""

    @classmethod
    def of(cls, parts: "Iterable[StreamSamples]") -> Self:
        """Size of the tokenised data of all sources together."""
        documents = tokens = samples = fed = 0
        for part in parts:
            documents, tokens = documents + part.n_documents, tokens + part.n_tokens
            samples += len(part)
            fed += len(part) * part.rows_per_sample * part.sequence_length
        return cls(documents, tokens, samples, tokens_per_epoch=fed)


@dataclass(frozen=True)
class _Source:
    """One source of a blend."""

    title: str
    train: _Side
    share: float
    """Share of the samples of the run."""
    passes: float
    """How often its samples are used in the run, on average."""


@dataclass(frozen=True)
class _Summary:
    """The lines of `dmt data prepare`."""

    train: _Side
    validation: _Side | None
    sources: tuple[_Source, ...]
    """The sources of a blend; empty for one source."""
    sequence_length: int
    vocab_size: int
    fingerprint: str
    cache: str


def _prepared(summary: _Summary) -> "Iterator[str]":
    for name, side in (("train", summary.train), ("validation", summary.validation)):
        if side is not None:
            yield (
                f"{name}: {side.documents:,} documents, {side.tokens:,} tokens, "
                f"{side.samples:,} samples of {summary.sequence_length:,} "
                f"({side.tokens_per_epoch:,} tokens per epoch)"
            )
    for source in summary.sources:
        side = source.train
        yield (
            f"  {source.title}: {source.share:.2%} of the samples, {source.passes:.2f} passes "
            f"over {side.documents:,} documents, {side.tokens:,} tokens, "
            f"{side.samples:,} samples"
        )
    yield f"cache: {summary.cache}"


def _build(recipe: Recipe) -> "TrainingData":
    from toolkit.data.build import recipe_data
    from toolkit.data.progress import with_bar

    return recipe_data(recipe, recipe.model.stated_vocabulary, with_bar)


def _prepare(recipe: Recipe) -> _Summary:
    from toolkit.data.files import cache_folder

    data = _build(recipe)
    return _Summary(
        train=_Side.of(source.train for source in data.sources),
        validation=_Side.of([*data.validation.values()]) if data.validation else None,
        sources=tuple(_sources(recipe, data)),
        sequence_length=recipe.training.sequence_length,
        vocab_size=len(data.tokenizer),
        fingerprint=data.fingerprint,
        cache=str(cache_folder(recipe.data.cache, Path.cwd())),
    )


def _sources(recipe: Recipe, data: "TrainingData") -> "Iterator[_Source]":
    from toolkit.data.blend import BlendOrder
    from toolkit.intake.checks import steps_with

    if not isinstance(data.order, BlendOrder):
        return
    steps = steps_with(recipe, data.samples_per_epoch, data.ends_after)
    seen = data.counts(steps)
    for source, count in zip(data.sources, seen, strict=True):
        side = _Side.of([source.train])
        yield _Source(source.title, side, count / sum(seen), count / side.samples)


@app.command(epilog="Example: dmt data show llama-bytes --samples 1")
def show(
    recipe: RecipePath,
    samples: Annotated[int, typer.Option(min=0, help="Samples to print.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to print of a document.")] = 500,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Print training samples with their trained tokens, and the lengths of samples."""
    from toolkit.cli.data_show import previews
    from toolkit.data.preview import preview

    data = _build(load_recipe(recipe, overrides))
    shown = {
        source.title: preview(source, data.tokenizer, samples, tokens)
        for source in data.sources
    }
    printed = shown if len(shown) > 1 else next(iter(shown.values()))
    output(as_json, printed, previews(shown), wrap=False)
