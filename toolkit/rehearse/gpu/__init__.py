"""A rank's training step on fake GPUs: fake tensors, which have shapes, dtypes and devices but
no elements, and a fake process group. This module has its results, and needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer states"
ACTIVATIONS, BACKWARD = "activations", "backward pass"
COMMUNICATION, BUFFERS, OTHER = "communication", "buffers", "other"


@dataclass(frozen=True)
class Peak:
    """What a GPU holds at its fullest."""

    nbytes: int
    """What is allocated, in blocks of PyTorch's allocator."""
    holders: Mapping[str, Mapping[str, int]]
    """Bytes by kind (a constant of this module) and by module or place, the largest first."""
