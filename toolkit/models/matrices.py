"""Which checkpoint tensors `optimizer.name: muon` orthogonalises, and its cost. Nothing here
imports torch."""

import re
from collections.abc import Sequence

EXCHANGED_AT_ONCE = 1 << 28
"""Elements of its shards, of whole matrices and of copies for their holders that a rank
exchanges at once; those of a single matrix may be more."""

_LAYER = re.compile(r"(?:.*\.)?\d+\.(?:.*\.weight|.*_proj)")
"""What is called `…_proj` itself is one expert's slice of a stack."""


def is_layer_matrix(tensor: str, dimensions: int) -> bool:
    """Is this checkpoint tensor the weight of a linear layer inside a decoder layer?

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
