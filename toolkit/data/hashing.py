"""Explicit integer hashing: values drawn from a seed are the same in every release.

Numpy's generators may change their streams between versions; these functions must not.
"""

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

SAMPLE_ORDER = 1
"""Purpose of a key: the order of samples within an epoch."""
HELD_OUT_DOCUMENTS = 2
"""Purpose of a key: the documents held out for validation."""


def mix64(values: UInt64Array) -> UInt64Array:
    """Hash each element; a bijection on 64-bit integers.

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
