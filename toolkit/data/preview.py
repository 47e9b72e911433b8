"""A preview of the training data: samples with their trained tokens, and statistics."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from toolkit.data.build import SourceData
from toolkit.data.rows import Int64Array, MarkedTokens

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
    """Tokens. The bin before ends where this one begins."""
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
    counts: dict[str, int | str | tuple[str, ...]] | None
    """What became of the rows of a chat data set (`ChatReport`)."""


def preview(
    source: SourceData, tokenizer: "PreTrainedTokenizerFast", samples: int, tokens: int
) -> Preview:
    """The first samples of a source, `tokens` of each document, and statistics."""
    train, report = source.train, source.report
    n_tokens, n_documents = len(train.stream), train.stream.n_documents
    n_rows = len(train) * train.rows_per_sample
    if report is None:
        # The stream gives all tokens but the first of each document as labels.
        share = 1 - n_documents / max(n_tokens, 1)
    else:
        share = report.trained_tokens / report.tokens
    return Preview(
        tuple(
            ShownSample(
                index,
                tuple(_shown(one, tokenizer, tokens) for one in train.documents(index)),
            )
            for index in range(min(samples, len(train)))
        ),
        len(train),
        n_documents,
        train.sequence_length,
        share,
        min(n_tokens / (n_rows * train.sequence_length), 1.0),
        tuple(_bins(train.stream.document_lengths(min(n_tokens, _MEASURED_TOKENS)))),
        None if report is None else asdict(report),
    )


def _shown(
    document: MarkedTokens, tokenizer: "PreTrainedTokenizerFast", limit: int
) -> ShownDocument:
    ids, trained = document.ids[:limit], document.trained.copy()
    trained[0] = False  # no token predicts it
    edges = [0, *(np.flatnonzero(np.diff(trained[:limit])) + 1).tolist(), len(ids)]
    passages = tuple(
        Passage(tokenizer.decode(ids[start:stop].tolist()), bool(trained[start]))
        for start, stop in pairwise(edges)
    )
    hidden = len(document.ids) - len(ids)
    return ShownDocument(len(document.ids), int(trained.sum()), passages, hidden)


def _bins(lengths: Int64Array) -> Iterator[LengthBin]:
    """Documents by the power of two that bounds their length."""
    exponents = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int64)
    counts = np.bincount(exponents)
    first = int(np.flatnonzero(counts)[0]) if len(lengths) else 0
    for exponent, count in enumerate(counts.tolist()):
        if exponent >= first:
            yield LengthBin(2**exponent, count)
