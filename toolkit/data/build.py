"""Builds packed samples from the recipe's data section: the entry point for training and
CLI."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.blend import BlendOrder, JoinedSamples, Stage, exact
from toolkit.data.chat.report import ChatReport
from toolkit.data.chat.stored import prepare_chats
from toolkit.data.files import cache_folder, fingerprint_of
from toolkit.data.indexed import write_indexed
from toolkit.data.interleave import Interleaving
from toolkit.data.order import EpochOrder, Order, held_out_conversations, held_out_documents
from toolkit.data.packing import (
    RowParts,
    StreamSamples,
    TokenStream,
    fitted_rows,
    packed_rows,
)
from toolkit.data.progress import Track, untracked
from toolkit.data.rows import Samples
from toolkit.data.tokenized import TokenizedData, cached_tokens, prepare
from toolkit.data.tokenizers import (
    check_vocabulary,
    load_tokenizer,
    stated_template,
)
from toolkit.errors import DataError
from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.recipe.schema import (
    ChatSource,
    DataSection,
    PreferenceSource,
    Source,
    TrainingSection,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class SourceData:
    title: str
    """The source's name in a list of sources."""
    train: StreamSamples
    held_out: StreamSamples | None
    """Documents of the same source that are not in `train`."""
    identity: tuple[object, ...]
    """Changes with the tokens and the split."""
    report: ChatReport | None
    """What became of the rows of chats and preferences."""


@dataclass(frozen=True)
class TrainingData:
    sources: tuple[SourceData, ...]
    """One, or those of a blend."""
    train: Samples
    """Samples of the sources. In a blend, one source follows the other."""
    order: Order
    batches: BatchSizes
    samples_per_epoch: int
    """Samples of a pass. In a blend, of the passes that its sources have `epochs` of."""
    validation: dict[str, StreamSamples]
    """Validation data by title. No document of it is in `train` if held out of the same
    source."""
    tokenizer: "PreTrainedTokenizerFast"
    fingerprint: str
    """Changes with the tokens, the split, the sequence length and whether documents are
    isolated, i.e. with the content of sample *i*."""
    whole_fingerprint: str
    """The same, with the sources of validation."""

    def fingerprint_at(self, samples: int) -> str:
        """Identifies the data for a checkpoint's cursor of this many samples: `fingerprint`,
        and the weights of a blend until then. Later stages may still change."""
        if isinstance(self.order, BlendOrder):
            return fingerprint_of([self.fingerprint, self.order.begun(samples)])
        return self.fingerprint

    def counts(self, steps: int) -> list[int]:
        """Number of samples that `steps` steps use of each source."""
        samples = self.batches.samples(steps)
        return (
            self.order.counts(samples).tolist()
            if isinstance(self.order, BlendOrder)
            else [samples]
        )

    def notes(self, steps: int) -> Iterator[str]:
        """Messages about a run of `steps` steps."""
        if isinstance(self.order, BlendOrder):
            for source, count in zip(self.sources, self.counts(steps), strict=True):
                if count > len(source.train):
                    times = count / len(source.train)
                    yield f"data: `{source.title}` is seen {times:.1f} times in this run"


def build_data(
    data: DataSection,
    training: TrainingSection,
    vocab_size: int | None,
    track: Track = untracked,
) -> TrainingData:
    """Tokenise (or find in the cache), split and pack the data of a recipe.

    `vocab_size` is the model's, None when unknown. Raises DataError if the data or the
    tokenizer is missing, does not fit the model, or is too small for one batch.
    """
    tokenizer = load_tokenizer(data.tokenizer, data.tokenizer_revision)
    check_vocabulary(data.tokenizer, len(tokenizer), vocab_size)
    if data.chat_template is not None:
        # Saved with the tokenizer: an exported model is to be prompted as it was trained.
        tokenizer.chat_template = stated_template(data.chat_template)
    length = training.sequence_length
    builder = _Builder(data, tokenizer, length, vocab_size, training.seed, track)
    sources = [builder.build(source, data.validation_fraction) for source in data.sources]
    others = [builder.build(source, 0.0) for source in data.validation_sources]

    def identity(parts: Iterable[SourceData]) -> str:
        fingerprint = fingerprint_of([part for one in parts for part in one.identity])
        if data.isolate_documents:
            fingerprint = fingerprint_of([fingerprint, "isolated documents"])
        return fingerprint_of([fingerprint, length])

    train, order, epoch = _ordered(data, sources, training)
    held_out = {one.title: one.held_out for one in sources if one.held_out is not None}
    validation = held_out | {one.title: one.train for one in others}
    # A blend may repeat a small source within a batch.
    least = 1 if isinstance(order, BlendOrder) else training.global_batch_size
    for one in sources:
        _check_size("training", one, one.train, least)
    for one in (*sources, *others):
        if (samples := validation.get(one.title)) is not None:
            _check_size("validation", one, samples, 1)
    return TrainingData(
        tuple(sources),
        train,
        order,
        training.batches,
        epoch,
        validation,
        tokenizer,
        identity(sources),
        identity([*sources, *others]),
    )


def _ordered(
    data: DataSection, sources: Sequence[SourceData], training: TrainingSection
) -> tuple[Samples, Order, int]:
    """The samples of all sources, their order, and the number of samples of an epoch."""
    seed, batches = training.seed, training.batches
    if not isinstance(data.train, tuple):
        only = sources[0].train
        return only, EpochOrder(seed, len(only)), len(only)
    joined = JoinedSamples([source.train for source in sources])
    sizes = [len(part) for part in joined.parts]
    epochs = [exact(source.epochs or 0.0) for source in data.sources]
    passes = [times * size for times, size in zip(epochs, sizes, strict=True)]
    weights = [exact(source.weight or 0.0) for source in data.sources]
    first = Stage(0, Interleaving(passes if any(passes) else weights))
    stages = [
        Stage(
            batches.samples(stage.from_step),
            Interleaving([exact(stage.weights[one.title]) for one in data.sources]),
        )
        for stage in data.stages
    ]
    order = BlendOrder(seed, sizes, [first, *stages])
    return joined, order, max(round(sum(passes)), 1)


@dataclass(frozen=True)
class _Builder:
    """Makes samples of sources. All of a recipe's have the same settings."""

    data: DataSection
    tokenizer: "PreTrainedTokenizerFast"
    sequence_length: int
    vocab_size: int | None
    seed: int
    track: Track

    def build(self, source: Source, fraction: float) -> SourceData:
        """Samples of one source. `fraction` of its documents are held out."""
        stored = self._tokens(source)
        identity: tuple[object, ...] = (stored.fingerprint,)
        if stored.row_numbers is not None:
            identity += (self.data.packing,)
        elif self.data.packing == "best_fit":
            identity += ("best fit",)

        def samples(stream: TokenStream, part: str) -> StreamSamples:
            key = fingerprint_of([*identity, part, self.sequence_length])
            return self._samples(source, stream, cache_folder() / "tokens" / key)

        if fraction == 0:
            whole = samples(TokenStream.whole(stored), "all")
            return SourceData(source.title, whole, None, identity, stored.report)
        split = f"of {fraction} by {self.seed}"
        if stored.row_numbers is None:
            held_out = held_out_documents(stored.indexed.n_documents, fraction, self.seed)
            chosen: tuple[object, ...] = (fraction, self.seed)
        else:
            held_out = held_out_conversations(stored.row_numbers, fraction, self.seed)
            chosen = (split,)
        return SourceData(
            source.title,
            samples(TokenStream.without(stored, held_out), f"train {split}"),
            samples(TokenStream.only(stored, held_out), f"validation {split}"),
            (*identity, *chosen),
            stored.report,
        )

    def _tokens(self, source: Source) -> TokenizedData:
        if isinstance(source, ChatSource | PreferenceSource):
            return prepare_chats(
                source,
                self.data,
                self.tokenizer,
                sequence_length=self.sequence_length,
                cache=cache_folder(),
                track=self.track,
            )
        return prepare(
            source,
            self.tokenizer,
            cache=cache_folder(),
            parse_special=self.data.special_tokens == "parse",
            track=self.track,
        )

    def _samples(self, source: Source, stream: TokenStream, rows: Path) -> StreamSamples:
        """The samples of a stream. Where documents share rows, `rows` is the cache entry of
        which ones do."""
        chats = isinstance(source, ChatSource | PreferenceSource)
        length = self.sequence_length
        packs = self.data.packing == ("greedy" if chats else "best_fit")
        parts = None
        if packs:
            found = packed_rows if chats else fitted_rows

            def write() -> None:
                write_indexed(rows, np.int64, found(stream, length))

            parts = RowParts.stored(cached_tokens(rows, write))
        elif chats:
            parts = RowParts.documents(stream)
        return StreamSamples(
            stream,
            length,
            parts,
            rows_per_sample=2 if isinstance(source, PreferenceSource) else 1,
            vocab_size=self.vocab_size,
            isolates=self.data.isolate_documents or (chats and packs),
        )


def _check_size(
    side: str, source: SourceData, dataset: StreamSamples, needed_samples: int
) -> None:
    if len(dataset) < needed_samples:
        length, n_tokens = dataset.sequence_length, len(dataset.stream)
        needed = f"{needed_samples:,}"
        if source.report is None:
            needed += f" ({needed_samples * length + 1:,} tokens)"
        raise DataError(
            f"the {side} data of `{source.title}` has {n_tokens:,} tokens, which make "
            f"{len(dataset):,} samples of {length:,} tokens; needed: {needed}",
            fix="use more data, or a smaller `training.sequence_length` or "
            "`training.global_batch_size`",
        )
