"""`dmt data`: tokenise ahead of a run, look at samples, train a tokenizer on the data."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from toolkit.cli.options import AsJson, Overrides, RecipePath
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.terminal import tell

if TYPE_CHECKING:
    from toolkit.data.build import TokenisedSamples, TrainingData

app = typer.Typer(no_args_is_help=True, help="Prepare training data and tokenizers.")


@app.command(epilog="Example: dmt data prepare recipes/tiny/llama-bytes.yaml")
def prepare(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Tokenise the recipe's data into the cache, and print its size."""
    summary = _prepare(load_recipe(recipe, overrides))
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
        return
    for name, side in (("train", summary.train), ("validation", summary.validation)):
        if side is not None:
            tell(
                f"{name}: {side.documents:,} documents, {side.tokens:,} tokens, "
                f"{side.samples:,} samples of {summary.sequence_length:,} "
                f"({side.tokens_per_epoch:,} tokens per epoch)",
                sys.stdout,
            )
    tell(f"unigram entropy: {summary.unigram_entropy_nats:.4f} nats per token", sys.stdout)
    tell(f"cache: {summary.cache}", sys.stdout)


@dataclass(frozen=True)
class _Side:
    """Size of the training or the validation data."""

    documents: int
    tokens: int
    samples: int
    tokens_per_epoch: int
    """Tokens that are fed to the model in one pass: samples times sequence length."""

    @classmethod
    def of(cls, dataset: "TokenisedSamples") -> Self:
        """Size of tokenised data."""
        return cls(
            documents=dataset.n_documents,
            tokens=dataset.n_tokens,
            samples=len(dataset),
            tokens_per_epoch=len(dataset) * dataset.rows_per_sample * dataset.sequence_length,
        )


@dataclass(frozen=True)
class _Summary:
    """What `dmt data prepare` prints."""

    train: _Side
    validation: _Side | None
    sequence_length: int
    vocab_size: int
    unigram_entropy_nats: float
    fingerprint: str
    cache: str


def _build(recipe: Recipe) -> "TrainingData":
    from toolkit.data.build import build_data
    from toolkit.data.progress import with_bar

    training = recipe.training
    return build_data(
        recipe.data,
        sequence_length=training.sequence_length,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        vocab_size=(recipe.model.config or {}).get("vocab_size"),
        base=Path.cwd(),
        track=with_bar,
    )


def _prepare(recipe: Recipe) -> _Summary:
    from toolkit.data.files import cache_folder

    data = _build(recipe)
    validation = data.validation
    return _Summary(
        train=_Side.of(data.train),
        validation=None if validation is None else _Side.of(validation),
        sequence_length=recipe.training.sequence_length,
        vocab_size=len(data.tokenizer),
        unigram_entropy_nats=data.unigram_entropy_nats(),
        fingerprint=data.fingerprint,
        cache=str(cache_folder(recipe.data.cache, Path.cwd())),
    )


@app.command(epilog="Example: dmt data show recipes/tiny/llama-bytes.yaml --samples 1")
def show(
    recipe: RecipePath,
    samples: Annotated[int, typer.Option(min=0, help="Samples to print.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to print of a document.")] = 500,
    overrides: Overrides = [],  # noqa: B006 - typer only reads it
    as_json: AsJson = False,
) -> None:
    """Print training samples with the tokens that are trained, and how long samples are."""
    from toolkit.cli.data_show import print_preview
    from toolkit.data.preview import preview

    shown = preview(_build(load_recipe(recipe, overrides)), samples, tokens)
    if as_json:
        typer.echo(json.dumps(asdict(shown)))
    else:
        print_preview(shown)


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
    if as_json:
        result = {"path": str(out), "vocab_size": n_tokens, "bytes_per_token": ratio}
        typer.echo(json.dumps(result))
        return
    if n_tokens < vocab_size:
        tell(f"the data fills only {n_tokens:,} of {vocab_size:,} tokens")
    tell(f"{out.resolve()}: {n_tokens:,} tokens, {ratio:.2f} bytes per token", sys.stdout)
    tell("In the recipe (and `vocab_size` in `model.config` at least as large):", sys.stdout)
    tell(f"  data:\n    tokenizer: {out.resolve()}", sys.stdout)
