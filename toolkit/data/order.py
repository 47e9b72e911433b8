"""The order of samples: a function of only the seed and the number of samples consumed, so it
is the same in every layout, and a run that stops anywhere resumes exactly.

The permutation of an epoch needs no memory and has random access: it is a Feistel network over
the smallest sufficient power of four, walked until it lands inside the data set ("cycle
walking", Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from toolkit.data.hashing import SAMPLE_ORDER, UInt64Array, derive_key, mix64
from toolkit.data.rows import Int64Array

_ROUNDS = 8


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
