"""Which tensors of a Hugging Face checkpoint are embeddings, and which are matrices of a
decoder layer, by their names."""

import re

LAYER = re.compile(r"(?:^|\.)(\d+)\.")
"""Names of what is in a decoder layer have its number, and only those."""
_EMBEDDING = re.compile(r"(^|[._])(\w*emb(ed(?!_out)\w*)?|wte|wpe|w)\b")
_MATRIX = re.compile(r"(?:.*\.)?\d+\.(?:.*\.weight|.*_proj)")
"""What is called `…_proj` itself is one expert's slice of a stack."""


def is_embedding(tensor: str) -> bool:
    """Whether this checkpoint tensor is an embedding, of tokens or positions."""
    return LAYER.search(tensor) is None and _EMBEDDING.search(tensor) is not None


def is_layer_matrix(tensor: str, dimensions: int) -> bool:
    """Whether this checkpoint tensor is the weight of a linear layer inside a decoder layer.

    These are Muon's (https://kellerjordan.github.io/posts/muon, arXiv:2502.16982, section 2):
    all projections, experts and routers. Embeddings, head, norms and biases are AdamW's. So are
    norms with a weight [heads, elements], and convolutions that are stored as matrices.
    """
    if dimensions != 2 or _MATRIX.fullmatch(tensor) is None:
        return False
    module = tensor.rsplit(".", 2)[-2]
    return "norm" not in module and "conv" not in module
