"""A preview of the training data: samples with their trained tokens, and statistics."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from toolkit.batch import IGNORE_INDEX
from toolkit.data.build import TrainingSamples
from toolkit.data.chat.dataset import ChatSamples
from toolkit.data.chat.template import MarkedTokens
from toolkit.data.rows import Int64Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MEASURED_TOKENS = 2**22
"""The lengths of documents are those at the beginning of the data, up to so many tokens."""


@dataclass(frozen=True)
class Passage:
    """Consecutive tokens of which all are trained, or none."""

    text: str
    trained: bool


@dataclass(frozen=True)
class ShownDocument:
    """A document of a sample: a conversation, an answer of a pair, or a part of a text."""

    tokens: int
    trained_tokens: int
    passages: tuple[Passage, ...]
    """The beginning of it, up to a number of tokens."""
    hidden_tokens: int
    """Tokens behind that."""


@dataclass(frozen=True)
class ShownSample:
    index: int
    documents: tuple[ShownDocument, ...]


@dataclass(frozen=True)
class LengthBin:
    up_to: int
    """Tokens; the bin before ends where this one begins."""
    documents: int


@dataclass(frozen=True)
class Preview:
    samples: tuple[ShownSample, ...]
    n_samples: int
    n_documents: int
    sequence_length: int
    trained_share: float
    """Trained tokens per token, of all data."""
    filled: float
    """Share of the positions that hold a token rather than padding."""
    lengths: tuple[LengthBin, ...]
    counts: dict[str, int | str] | None
    """What became of the rows of a chat data set (`ChatReport`)."""


def preview(
    train: TrainingSamples, tokenizer: "PreTrainedTokenizerFast", samples: int, tokens: int
) -> Preview:
    """The first samples of a source, `tokens` of each document, and statistics."""
    n_rows = len(train) * train.rows_per_sample
    positions = n_rows * train.sequence_length
    if isinstance(train, ChatSamples):
        report = train.chats.report
        counts = asdict(report)
        share, filled = report.trained_tokens / report.tokens, train.n_tokens / positions
        lengths = train.lengths()
    else:
        counts = None
        # The stream gives all tokens but the first of each document as labels.
        share = 1 - train.n_documents / max(train.n_tokens, 1)
        filled = min(train.n_tokens / positions, 1.0)
        lengths = train.stream.document_lengths(min(train.n_tokens, _MEASURED_TOKENS))
    return Preview(
        tuple(
            ShownSample(
                index,
                tuple(_shown(one, tokenizer, tokens) for one in _documents(train, index)),
            )
            for index in range(min(samples, len(train)))
        ),
        len(train),
        train.n_documents,
        train.sequence_length,
        share,
        filled,
        tuple(_bins(lengths)),
        counts,
    )


def _documents(train: TrainingSamples, index: int) -> Iterator[MarkedTokens]:
    if isinstance(train, ChatSamples):
        yield from train.conversations(index)
        return
    (row,) = train.rows(index)
    trained = np.append([False], row.labels[: train.filled(index) - 1] != IGNORE_INDEX)
    starts = [0, *(np.flatnonzero(~trained[1:]) + 1).tolist(), len(trained)]
    for start, stop in pairwise(starts):
        yield MarkedTokens(row.input_ids[start:stop], trained[start:stop])


def _shown(
    document: MarkedTokens, tokenizer: "PreTrainedTokenizerFast", limit: int
) -> ShownDocument:
    ids, trained = document.ids[:limit], document.trained[:limit]
    edges = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1).tolist(), len(ids)]
    passages = tuple(
        Passage(tokenizer.decode(ids[start:stop].tolist()), bool(trained[start]))
        for start, stop in pairwise(edges)
    )
    n_trained = int(document.trained.sum())
    return ShownDocument(len(document.ids), n_trained, passages, len(document.ids) - len(ids))


def _bins(lengths: Int64Array) -> Iterator[LengthBin]:
    """Documents by the power of two that bounds their length."""
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0]) if len(lengths) else 0
    for exponent, count in enumerate(counts.tolist()):
        if exponent >= first:
            yield LengthBin(2**exponent, count)
