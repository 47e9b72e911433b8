"""From the recipe's data section to packed samples: the one entry for training and CLI."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.data.files import cache_folder, fingerprint_of
from toolkit.data.packing import PackedDataset, TokenStream
from toolkit.data.progress import Track, untracked
from toolkit.data.split import held_out_documents
from toolkit.data.tokenized import TokenizedData, prepare
from toolkit.data.tokenizers import check_vocabulary, load_tokenizer
from toolkit.errors import DataError
from toolkit.recipe.schema import DataSection, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TrainingData:
    """Everything that training reads."""

    train: PackedDataset
    validation: PackedDataset | None
    """No document of it is in `train` when it was held out of the same source."""
    tokenizer: "PreTrainedTokenizerFast"
    fingerprint: str
    """Changes with the tokens, the split, the sequence length and whether documents are
    isolated; a checkpoint's cursor is meaningful only together with it."""

    def unigram_entropy_nats(self) -> float:
        """Entropy of the training tokens; a model that learns anything gets below it."""
        return self.train.unigram_entropy_nats()


def build_data(
    data: DataSection,
    *,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    vocab_size: int | None,
    base: Path,
    track: Track = untracked,
) -> TrainingData:
    """Tokenise (or find in the cache), split and pack the data of a recipe.

    `vocab_size` is the model's, None when unknown; `base` is where relative paths start.
    `track` shows progress of long work.

    Raises DataError when the data or the tokenizer is missing, does not fit the model, or
    is too small for one global batch.
    """
    tokenizer = load_tokenizer(data.tokenizer, data.tokenizer_revision, base=base)
    check_vocabulary(data.tokenizer, len(tokenizer), vocab_size)
    streams = _prepare_streams(data, tokenizer, seed=seed, base=base, track=track)

    def packed(stream: TokenStream) -> PackedDataset:
        return PackedDataset(
            stream, sequence_length, vocab_size, isolate_documents=data.isolate_documents
        )

    train = packed(streams.train)
    _check_size("training", train, global_batch_size)
    validation = None
    if streams.validation is not None:
        validation = packed(streams.validation)
        _check_size("validation", validation, 1)
    isolated = ["isolated documents"] * data.isolate_documents
    fingerprint = fingerprint_of([streams.fingerprint, sequence_length, *isolated])
    return TrainingData(train, validation, tokenizer, fingerprint)


@dataclass(frozen=True)
class _Streams:
    train: TokenStream
    validation: TokenStream | None
    fingerprint: str


def _prepare_streams(
    data: DataSection,
    tokenizer: "PreTrainedTokenizerFast",
    *,
    seed: int,
    base: Path,
    track: Track,
) -> _Streams:
    """Tokens of both sides: two sources, or one that is divided by document."""

    def tokens_of(source: Source) -> TokenizedData:
        return prepare(
            source,
            tokenizer,
            base=base,
            cache=cache_folder(data.cache, base),
            parse_special=data.special_tokens == "parse",
            track=track,
        )

    train = tokens_of(data.train)
    if data.validation is not None:
        other = tokens_of(data.validation)
        fingerprint = fingerprint_of([train.fingerprint, other.fingerprint])
        return _Streams(TokenStream.whole(train), TokenStream.whole(other), fingerprint)
    if data.validation_fraction == 0:
        return _Streams(TokenStream.whole(train), None, fingerprint_of([train.fingerprint]))
    documents = held_out_documents(train.indexed.n_documents, data.validation_fraction, seed)
    return _Streams(
        TokenStream.without(train, documents),
        TokenStream.only(train, documents),
        fingerprint_of([train.fingerprint, data.validation_fraction, seed]),
    )


def _check_size(side: str, dataset: PackedDataset, needed_samples: int) -> None:
    if len(dataset) < needed_samples:
        length = dataset.sequence_length
        raise DataError(
            f"the {side} data has {len(dataset.stream):,} tokens, which make {len(dataset):,} "
            f"samples of {length:,} tokens; needed: {needed_samples:,} "
            f"({needed_samples * length + 1:,} tokens)",
            fix="use more data, or a smaller `training.sequence_length` or "
            "`training.global_batch_size`",
        )
