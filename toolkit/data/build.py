"""From the recipe's data section to packed samples: the one entry for training and CLI."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from toolkit.data.chat.dataset import ChatSamples, chat_samples, split_rows
from toolkit.data.chat.named import template_text
from toolkit.data.chat.tokens import StoredChats, prepare_chats
from toolkit.data.files import cache_folder, fingerprint_of
from toolkit.data.packing import PackedDataset, TokenStream
from toolkit.data.progress import Track, untracked
from toolkit.data.rows import Int64Array
from toolkit.data.split import held_out_documents
from toolkit.data.tokenized import TokenizedData, prepare
from toolkit.data.tokenizers import check_vocabulary, load_tokenizer
from toolkit.errors import DataError
from toolkit.recipe.schema import (
    ChatRowsSource,
    ChatSource,
    DataSection,
    DocumentSource,
    PreferenceSource,
    Source,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


TokenisedSamples: TypeAlias = PackedDataset | ChatSamples
"""Samples of text, or of chats and preferences."""


@dataclass(frozen=True)
class TrainingData:
    """Everything that training reads."""

    train: TokenisedSamples
    validation: TokenisedSamples | None
    """No document of it is in `train` when it was held out of the same source."""
    tokenizer: "PreTrainedTokenizerFast"
    fingerprint: str
    """Changes with the tokens, the split, the sequence length and whether documents are
    isolated; a checkpoint's cursor is meaningful only together with it."""

    def unigram_entropy_nats(self) -> float:
        """Entropy of the trained tokens; a model that learns anything gets below it."""
        counts = self.train.token_counts()
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())


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
    if isinstance(data.train, ChatRowsSource):
        sides = _chat_sides(data, tokenizer, sequence_length, seed=seed, base=base, track=track)
    else:
        streams = _prepare_streams(data, tokenizer, seed=seed, base=base, track=track)
        sides = _text_sides(
            streams, sequence_length, vocab_size, isolate_documents=data.isolate_documents
        )
    _check_size("training", sides.train, global_batch_size)
    if sides.validation is not None:
        _check_size("validation", sides.validation, 1)
    fingerprint = fingerprint_of([sides.fingerprint, sequence_length])
    return TrainingData(sides.train, sides.validation, tokenizer, fingerprint)


@dataclass(frozen=True)
class _Sides:
    train: TokenisedSamples
    validation: TokenisedSamples | None
    fingerprint: str


def _chat_sides(
    data: DataSection,
    tokenizer: "PreTrainedTokenizerFast",
    sequence_length: int,
    *,
    seed: int,
    base: Path,
    track: Track,
) -> _Sides:
    """Samples of chats or preferences: two sources, or one that is divided by row."""
    cache = cache_folder(data.cache, base)
    # Saved with the tokenizer: an exported model is to be prompted as it was trained.
    tokenizer.chat_template = template_text(data.chat_template, tokenizer, base)

    def stored(source: Source) -> StoredChats:
        assert isinstance(source, ChatSource | PreferenceSource), "the recipe's check"
        return prepare_chats(
            source,
            data,
            tokenizer,
            sequence_length=sequence_length,
            base=base,
            cache=cache,
            track=track,
        )

    def samples(chats: StoredChats, numbers: Int64Array, part: str) -> ChatSamples:
        pairs = isinstance(data.train, PreferenceSource)
        return chat_samples(
            chats,
            numbers,
            sequence_length,
            rows_per_sample=2 if pairs else 1,
            packing=data.packing,
            part=part,
            cache=cache,
        )

    def whole(chats: StoredChats) -> ChatSamples:
        return samples(chats, np.arange(chats.indexed.n_documents, dtype=np.int64), "all")

    train = stored(data.train)
    parts: list[object] = [train.fingerprint, data.packing]
    if data.validation is not None:
        other = stored(data.validation)
        return _Sides(whole(train), whole(other), fingerprint_of([*parts, other.fingerprint]))
    if data.validation_fraction == 0:
        return _Sides(whole(train), None, fingerprint_of(parts))
    split = f"of {data.validation_fraction} by {seed}"
    kept, held_out = split_rows(train, data.validation_fraction, seed)
    return _Sides(
        samples(train, kept, f"train {split}"),
        samples(train, held_out, f"validation {split}"),
        fingerprint_of([*parts, split]),
    )


def _text_sides(
    streams: "_Streams",
    sequence_length: int,
    vocab_size: int | None,
    *,
    isolate_documents: bool,
) -> _Sides:
    """Samples of text: the tokens of all documents, cut at equal lengths."""

    def packed(stream: TokenStream) -> PackedDataset:
        return PackedDataset(
            stream, sequence_length, vocab_size, isolate_documents=isolate_documents
        )

    train = packed(streams.train)
    validation = None if streams.validation is None else packed(streams.validation)
    parts = [streams.fingerprint, *["isolated documents"] * isolate_documents]
    return _Sides(train, validation, fingerprint_of(parts) if parts[1:] else parts[0])


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
        assert isinstance(source, DocumentSource), "the recipe's check"
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


def _check_size(side: str, dataset: TokenisedSamples, needed_samples: int) -> None:
    if len(dataset) < needed_samples:
        length = dataset.sequence_length
        needed = f"{needed_samples:,}"
        if isinstance(dataset, PackedDataset):
            needed += f" ({needed_samples * length + 1:,} tokens)"
        raise DataError(
            f"the {side} data has {dataset.n_tokens:,} tokens, which make {len(dataset):,} "
            f"samples of {length:,} tokens; needed: {needed}",
            fix="use more data, or a smaller `training.sequence_length` or "
            "`training.global_batch_size`",
        )
