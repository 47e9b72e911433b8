"""The order of samples, and which documents are held out: functions of only the seed and the
number of samples consumed, so they are the same in every layout, and a run that stops anywhere
resumes exactly. Numpy's generators may change between versions. The hashes here must not.

The permutation of an epoch needs no memory and has random access: it is a Feistel network over
the smallest sufficient power of four, walked until it lands inside the data set ("cycle
walking", Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from toolkit.data.rows import Int64Array
from toolkit.errors import DataError

UInt64Array = npt.NDArray[np.uint64]

SAMPLE_ORDER = 1
"""Purpose of a key: the order of samples within an epoch."""
HELD_OUT_DOCUMENTS = 2
"""Purpose of a key: the documents held out for validation."""
_ROUNDS = 8


def mix64(values: UInt64Array) -> UInt64Array:
    """Hash each element. A bijection on 64-bit integers.

    This is the output function of splitmix64 (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", OOPSLA 2014). Arithmetic is modulo 2**64, which
    numpy does silently for arrays of at least one dimension.
    """
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def derive_key(seed: int, *parts: int) -> UInt64Array:
    """Key, uint64 [1], of a seed and further numbers (purpose, epoch, …), each below 2**64."""
    key = mix64(np.array([seed], dtype=np.uint64))
    for part in parts:
        key = mix64(key ^ np.uint64(part))
    return key


class Order(Protocol):
    def indices(self, position: int, count: int) -> Int64Array:
        """Samples at places `position … position + count - 1`, int64 [count].

        `position` is the number of samples consumed before.
        """
        ...


@dataclass(frozen=True)
class EpochOrder:
    """All samples of a data set, once per epoch, each epoch in a different order."""

    seed: int
    n_samples: int
    source: int = 0
    """Number of the source: sources of equal size are shuffled differently."""

    def indices(self, position: int, count: int) -> Int64Array:
        positions = np.arange(position, position + count, dtype=np.uint64)
        epochs, within = np.divmod(positions, np.uint64(self.n_samples))
        indices = np.empty(count, dtype=np.int64)
        # The first source has the order of a data set that is not blended.
        source = [self.source] * (self.source > 0)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            key = derive_key(self.seed, SAMPLE_ORDER, int(epoch), *source)
            indices[chosen] = permute(within[chosen], self.n_samples, key)
        return indices


def permute(values: UInt64Array, size: int, key: UInt64Array) -> UInt64Array:
    """Map distinct `values` in [0, size) to distinct values in [0, size), keyed by `key`."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    rounds: UInt64Array = np.arange(_ROUNDS, dtype=np.uint64)
    round_keys = mix64(key + rounds)
    permuted = _feistel(values, half_bits, round_keys)
    while (outside := permuted >= np.uint64(size)).any():
        permuted[outside] = _feistel(permuted[outside], half_bits, round_keys)
    return permuted


def _feistel(values: UInt64Array, half_bits: int, round_keys: UInt64Array) -> UInt64Array:
    """Bijection on [0, 4**half_bits): each round mixes one half into the other."""
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (mix64(right ^ round_key) & mask)
    return (left << shift) | right


def held_out_documents(n_documents: int, fraction: float, seed: int) -> Int64Array:
    """Documents held out for validation, ascending, int64 [held out].

    These are the `fraction` of the documents (at least one, never all) whose number, hashed
    with the seed, is smallest. Takes 16 bytes of memory per document while it runs.

    Raises DataError when there are not enough documents for both sides.
    """
    if n_documents < 2:
        raise DataError(
            f"`validation_fraction: {fraction}` holds out whole documents, but the training "
            f"data has only {n_documents}",
            fix="give `data.validation` a source of its own, split the text into several "
            "documents, or set `validation_fraction: 0`",
        )
    n_held_out = min(max(round(fraction * n_documents), 1), n_documents - 1)
    numbers = np.arange(n_documents, dtype=np.uint64)
    hashes = mix64(numbers ^ derive_key(seed, HELD_OUT_DOCUMENTS))
    return np.sort(np.argpartition(hashes, n_held_out - 1)[:n_held_out])


def held_out_conversations(row_numbers: Int64Array, fraction: float, seed: int) -> Int64Array:
    """The same for conversations, whose rows of the data set are held out whole.

    `row_numbers`: the row of each conversation. Raises DataError as `held_out_documents`.
    """
    rows, row_of = np.unique(row_numbers, return_inverse=True)
    held_out = np.zeros(len(rows), dtype=np.bool_)
    held_out[held_out_documents(len(rows), fraction, seed)] = True
    return np.flatnonzero(held_out[row_of])
