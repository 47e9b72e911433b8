"""Statistics of a source: documents, tokens, lengths and duplicates."""

from array import array
from dataclasses import dataclass

import numpy as np

from toolkit.data.build import TokenisedSamples
from toolkit.data.chat.dataset import ChatSamples
from toolkit.data.files import damage_hash
from toolkit.data.packing import TokenStream

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class SourceStatistics:
    """Of the training documents of one source, or of its conversations or answers."""

    documents: int
    tokens: int
    length_quantiles: dict[str, int]
    """Tokens of a document, by the share of documents that are no longer: `0.05` … `1`."""
    compared: int
    """Documents that were read to find duplicates: all, but of tokens in a remote store only
    the beginning."""
    duplicates: int
    """Compared documents whose tokens are those of one before."""


def source_statistics(train: TokenisedSamples) -> SourceStatistics:
    if isinstance(train, ChatSamples):
        lengths, hashes = train.lengths(), _chat_hashes(train)
    else:
        stream = train.stream
        lengths, hashes = stream.document_lengths(len(stream)), _document_hashes(stream)
    at = np.quantile(lengths, QUANTILES, method="inverted_cdf").tolist() if len(lengths) else []
    quantiles = dict(zip(map(str, QUANTILES), at, strict=False))
    if len(lengths):
        quantiles |= {"0": int(lengths.min()), "1": int(lengths.max())}
    return SourceStatistics(
        documents=train.n_documents,
        tokens=int(lengths.sum()),
        length_quantiles=dict(sorted(quantiles.items(), key=lambda one: float(one[0]))),
        compared=len(hashes),
        duplicates=len(hashes) - len(np.unique(hashes)),
    )


def _document_hashes(stream: TokenStream) -> "array[int]":
    """64 bits of the hash of each document's tokens."""
    found, hashed = array("Q"), damage_hash()
    for tokens, ends in stream.beginning():
        at = 0
        for behind in (ends + 1).tolist():
            hashed.update(tokens[at:behind].data)
            found.append(hashed.intdigest() & (2**64 - 1))
            hashed, at = damage_hash(), behind
        hashed.update(tokens[at:].data)
    return found


def _chat_hashes(train: ChatSamples) -> "array[int]":
    found = array("Q")
    for index in range(len(train)):
        for chat in train.conversations(index):
            found.append(damage_hash(chat.ids.data).intdigest() & (2**64 - 1))
    return found
