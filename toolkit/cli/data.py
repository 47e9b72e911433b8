"""`dmt data`: tokenise ahead of a run, look at samples."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import AsJson, Overrides, RecipePath
from toolkit.cli.output import output
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from toolkit.data.build import TrainingData
    from toolkit.data.packing import StreamSamples

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Prepare training data, and show it.",
)


@app.command()
def prepare(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Tokenise the recipe's data into the cache, and print its size.

    Example: `dmt data prepare llama-bytes`
    """
    from toolkit.data.files import cache_folder

    loaded = load_recipe(recipe, overrides)
    data = _build(loaded)
    summary = {
        "train": _size([source.train for source in data.sources]),
        "validation": _size([*data.validation.values()]) if data.validation else None,
        "sources": [*_sources(loaded, data)],
        "sequence_length": loaded.training.sequence_length,
        "vocab_size": len(data.tokenizer),
        "fingerprint": data.fingerprint,
        "cache": str(cache_folder()),
    }
    output(as_json, summary, _lines(summary), wrap=False)


def _size(parts: "Sequence[StreamSamples]") -> dict[str, int]:
    """Sum up the tokenised data of several sources."""
    return {
        "documents": sum(part.stream.n_documents for part in parts),
        "tokens": sum(len(part.stream) for part in parts),
        "samples": sum(map(len, parts)),
        "tokens_per_epoch": sum(
            len(part) * part.rows_per_sample * part.sequence_length for part in parts
        ),
    }


def _lines(summary: "Mapping[str, Any]") -> "Iterator[str]":
    for name in ("train", "validation"):
        if (side := summary[name]) is not None:
            yield (
                f"{name}: {side['documents']:,} documents, {side['tokens']:,} tokens, "
                f"{side['samples']:,} samples of {summary['sequence_length']:,} "
                f"({side['tokens_per_epoch']:,} tokens per epoch)"
            )
    for source in summary["sources"]:
        side = source["train"]
        yield (
            f"  {source['title']}: {source['share']:.2%} of the samples, "
            f"{source['passes']:.2f} passes over {side['documents']:,} documents, "
            f"{side['tokens']:,} tokens, {side['samples']:,} samples"
        )
    yield f"cache: {summary['cache']}"


def _build(recipe: Recipe) -> "TrainingData":
    from toolkit.data.build import build_data
    from toolkit.data.progress import with_bar

    return build_data(recipe.data, recipe.training, recipe.model.stated_vocabulary, with_bar)


def _sources(recipe: Recipe, data: "TrainingData") -> "Iterator[dict[str, Any]]":
    """The sources of a blend: each one's share of the run's samples, and how often each of its
    samples is used."""
    from toolkit.data.blend import BlendOrder
    from toolkit.intake.checks import steps_with

    if not isinstance(data.order, BlendOrder):
        return
    seen = data.counts(steps_with(recipe, data.samples_per_epoch))
    for source, count in zip(data.sources, seen, strict=True):
        yield {
            "title": source.title,
            "train": _size([source.train]),
            "share": count / sum(seen),
            "passes": count / len(source.train),
        }


@app.command()
def show(
    recipe: RecipePath,
    samples: Annotated[int, typer.Option(min=0, help="Samples to print.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to print of a document.")] = 500,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Print training samples with their trained tokens, and the lengths of samples.

    Example: `dmt data show llama-bytes --samples 1`
    """
    from toolkit.cli.data_show import previews
    from toolkit.data.preview import preview

    data = _build(load_recipe(recipe, overrides))
    shown = {
        source.title: preview(source, data.tokenizer, samples, tokens)
        for source in data.sources
    }
    printed = shown if len(shown) > 1 else next(iter(shown.values()))
    output(as_json, printed, previews(shown), wrap=False)
