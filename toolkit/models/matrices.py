"""Which checkpoint tensors `optimizer.name: muon` orthogonalises, and the cost; which of them
`adamw_8bit` quantises. Nothing here imports torch."""

import re
from collections.abc import Sequence
from math import prod

from toolkit.models.parameter_groups import is_embedding

EXCHANGED_AT_ONCE = 1 << 28
"""Elements of its shards, of whole matrices and of copies for their holders that a rank
exchanges at once; those of a single matrix may be more."""

MIN_8BIT_SIZE = 4096
"""Elements of the smallest tensor with 8-bit moments, by bitsandbytes' default."""
BLOCK_8BIT = 256
"""Elements that share a scale in bitsandbytes."""

_LAYER = re.compile(r"(?:.*\.)?\d+\.(?:.*\.weight|.*_proj)")
"""What is called `…_proj` itself is one expert's slice of a stack."""


def is_layer_matrix(tensor: str, dimensions: int) -> bool:
    """Whether this checkpoint tensor is the weight of a linear layer inside a decoder layer.

    These are Muon's (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982, section 2):
    all projections, experts and routers; embeddings, head, norms and biases are AdamW's. Names
    of decoder layers have their number, and only those. A norm stays one where its weight has
    two dimensions, of heads and of their elements, and a convolution where it is stored as a
    matrix.
    """
    if dimensions != 2 or _LAYER.fullmatch(tensor) is None:
        return False
    module = tensor.rsplit(".", 2)[-2]
    return "norm" not in module and "conv" not in module


def newton_schulz_flops(shape: Sequence[int], steps: int) -> int:
    """Of `steps` Newton-Schulz steps on a matrix: with m ≤ n, x xᵀ and its product with x are
    2 m² n each, (x xᵀ)² is 2 m³."""
    m, n = sorted(shape)
    return steps * 2 * m * m * (2 * n + m)


def has_codes(tensor: str, shape: Sequence[int]) -> bool:
    """Whether `adamw_8bit` keeps this checkpoint tensor's moments in 8 bits."""
    return prod(shape) >= MIN_8BIT_SIZE and not is_embedding(tensor)


def scale_count(shape: Sequence[int]) -> int:
    """Scales of an 8-bit moment of a tensor: one for each block, the last one's too."""
    return -(-prod(shape) // BLOCK_8BIT)
