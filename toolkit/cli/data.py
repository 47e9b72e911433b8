"""`dmt data`: tokenise ahead of a run, look at samples, train a tokenizer on the data."""

from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from toolkit.cli.options import AsJson, Overrides, RecipePath
from toolkit.cli.output import output
from toolkit.errors import DataError
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.text.terminal import tell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from toolkit.data.build import SourceData, TokenisedSamples, TrainingData
    from toolkit.data.statistics import SourceStatistics
    from toolkit.data.streaming.streams import Streams

app = typer.Typer(no_args_is_help=True, help="Prepare training data and tokenizers.")


@app.command(epilog="Example: dmt data prepare recipes/tiny/llama-bytes.yaml")
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
    def of(cls, parts: "Iterable[TokenisedSamples]") -> Self:
        """Size of the tokenised data of all sources together."""
        documents = tokens = samples = fed = 0
        for part in parts:
            documents, tokens = documents + part.n_documents, tokens + part.n_tokens
            samples += len(part)
            fed += len(part) * part.rows_per_sample * part.sequence_length
        return cls(documents, tokens, samples, tokens_per_epoch=fed)

    @classmethod
    def joined(cls, sides: "Iterable[_Side]") -> Self:
        """All of them together."""
        return cls(*map(sum, zip(*map(astuple, sides), strict=True)))


@dataclass(frozen=True)
class _Source:
    """One source of a blend."""

    title: str
    train: _Side
    share: float
    """Of the samples of the run."""
    passes: float
    """How often its samples are used in the run, on average."""


@dataclass(frozen=True)
class _Summary:
    """What `dmt data prepare` prints."""

    train: _Side
    validation: _Side | None
    sources: tuple[_Source, ...]
    """Of a blend."""
    sequence_length: int
    vocab_size: int
    unigram_entropy_nats: float
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
    yield f"unigram entropy: {summary.unigram_entropy_nats:.4f} nats per token"
    yield f"cache: {summary.cache}"


def _build(recipe: Recipe) -> "TrainingData":
    from toolkit.data.build import recipe_data
    from toolkit.data.progress import with_bar

    return recipe_data(recipe, recipe.model.stated_vocabulary, with_bar)


def _prepare(recipe: Recipe) -> _Summary:
    from toolkit.data.files import cache_folder

    data = _build(recipe)
    if data.streams is not None:
        _tokenise_chunks(data.streams)
    sides = [_Side.of(_parts(source)) for source in data.sources]
    return _Summary(
        train=_Side.joined(sides),
        validation=_Side.of([*data.validation.values()]) if data.validation else None,
        sources=tuple(_sources(recipe, data, sides)),
        sequence_length=data.lengths.longest,
        vocab_size=len(data.tokenizer),
        unigram_entropy_nats=data.unigram_entropy_nats(),
        fingerprint=data.fingerprint,
        cache=str(cache_folder(recipe.data.cache, Path.cwd())),
    )


def _tokenise_chunks(streams: "Streams") -> None:
    """Tokenise all chunks that are not in the cache; other processes help."""
    from toolkit.data.progress import with_bar
    from toolkit.data.streaming.ahead import AheadWorkers

    chunks, sources = streams.all_chunks(), streams.sources
    # They begin at the other end.
    with AheadWorkers(sources, streams.section.workers, lambda: chunks[::-1]):
        for number, chunk in with_bar(chunks, "tokenising", len(chunks)):
            source = sources[number]
            assert source is not None, "streamed"
            source.tokens(chunk)


def _parts(source: "SourceData") -> "Iterable[TokenisedSamples]":
    """The samples of a source; one that is streamed has them in chunks."""
    from toolkit.data.streaming.samples import StreamedSamples

    train = source.train
    return train.every_chunk() if isinstance(train, StreamedSamples) else [train]


def _sources(
    recipe: Recipe, data: "TrainingData", sides: "Iterable[_Side]"
) -> "Iterator[_Source]":
    from toolkit.data.blend import Blended
    from toolkit.intake.checks import steps_with

    if not isinstance(data.order, Blended):
        return
    steps = steps_with(recipe, data.samples_per_epoch, data.ends_after)
    seen = data.counts(steps)
    for source, side, count in zip(data.sources, sides, seen, strict=True):
        yield _Source(source.title, side, count / sum(seen), count / side.samples)


@app.command(epilog="Example: dmt data show recipes/tiny/llama-bytes.yaml --samples 1")
def show(
    recipe: RecipePath,
    samples: Annotated[int, typer.Option(min=0, help="Samples to print.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to print of a document.")] = 500,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Print training samples with their trained tokens, and the lengths of samples."""
    from toolkit.cli.data_show import previews
    from toolkit.data.build import tokenised
    from toolkit.data.preview import preview

    data = _build(load_recipe(recipe, overrides))
    shown = {
        source.title: preview(tokenised(source.train), data.tokenizer, samples, tokens)
        for source in data.sources
    }
    printed = shown if len(shown) > 1 else next(iter(shown.values()))
    output(as_json, printed, previews(shown), wrap=False)


@app.command(epilog="Example: dmt data stats recipes/tiny/llama-bytes.yaml")
def stats(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Print statistics of each source: documents, tokens, lengths, duplicates, share."""
    from toolkit.data.build import tokenised
    from toolkit.data.statistics import source_statistics

    loaded = load_recipe(recipe, overrides)
    if loaded.data.streaming is not None:
        fix = "add --set data.streaming=null, which tokenises all of it first"
        raise DataError("`dmt data stats` needs all data, which the recipe streams", fix=fix)
    data = _build(loaded)
    sides = (_Side.of(_parts(source)) for source in data.sources)
    shares = {source.title: source.share for source in _sources(loaded, data, sides)}
    parts = {source.title: tokenised(source.train) for source in data.sources}
    found = {title: source_statistics(part) for title, part in parts.items()}
    rows = {
        title: {**asdict(one), "share": shares.get(title, 1.0)} for title, one in found.items()
    }
    output(as_json, rows, _statistics(found, shares), wrap=False)


def _statistics(
    found: "Mapping[str, SourceStatistics]", shares: "Mapping[str, float]"
) -> "Iterator[str]":
    for title, one in found.items():
        lengths = ", ".join(
            f"{length:,} at {float(share):.0%}"
            for share, length in one.length_quantiles.items()
        )
        share = shares.get(title, 1.0)
        yield (
            f"{title}: {one.documents:,} documents, {one.tokens:,} tokens, "
            f"{share:.2%} of the samples"
        )
        yield f"  tokens of a document: {lengths}"
        yield (
            f"  duplicates: {one.duplicates:,} of {one.compared:,} documents "
            f"({one.duplicates / max(one.compared, 1):.2%})"
        )


@app.command(epilog="Example: dmt data verify recipes/tiny/llama-bytes.yaml")
def verify(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Read the recipe's whole data cache, and compare it with the stored hashes."""
    from toolkit.data.files import cache_folder
    from toolkit.data.progress import with_bar
    from toolkit.data.verify import verify_cache

    cache = cache_folder(load_recipe(recipe, overrides).data.cache, Path.cwd())
    found = verify_cache(cache, with_bar)
    old = "  not checked, an earlier release wrote it without a hash: "
    lines = [
        f"{cache}: {found.checked:,} entries are undamaged",
        *(f"{old}{path}" for path in found.unknown),
        *(f"  damaged: {path}" for path in found.damaged),
    ]
    data = {"cache": str(cache), **asdict(found)}
    output(as_json, data, lines, wrap=False)
    if found.damaged:
        raise DataError(
            f"{len(found.damaged):,} files in the data cache are damaged",
            fix="delete these files, and run `dmt data prepare` to make them again",
        )


@app.command(
    epilog="Example: dmt data tokenizer recipes/tiny/llama-bytes.yaml "
    "--vocab-size 4096 --out bpe"
)
def tokenizer(
    recipe: RecipePath,
    vocab_size: Annotated[
        int, typer.Option(help="Tokens, with 256 bytes and the end of text.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write, new or without a tokenizer.")],
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE on the recipe's training documents (without those held out)."""
    from toolkit.data.corpus import bytes_per_token, open_training_corpus
    from toolkit.data.tokenizers import check_bpe_output, train_bpe

    loaded = load_recipe(recipe, overrides)
    check_bpe_output(vocab_size, out)
    corpus = open_training_corpus(loaded.data, seed=loaded.training.seed, base=Path.cwd())
    trained = train_bpe(corpus, vocab_size, out, progress=True)
    n_tokens, ratio = len(trained), bytes_per_token(trained, corpus)
    if n_tokens < vocab_size and not as_json:
        tell(f"the data fills only {n_tokens:,} of {vocab_size:,} tokens")
    lines = [
        f"{out.resolve()}: {n_tokens:,} tokens, {ratio:.2f} bytes per token",
        "In the recipe (and `vocab_size` in `model.config` at least as large):",
        f"  data:\n    tokenizer: {out.resolve()}",
    ]
    data = {"path": str(out), "vocab_size": n_tokens, "bytes_per_token": ratio}
    output(as_json, data, lines, wrap=False)
