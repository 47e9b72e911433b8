"""Muon (https://kellerjordan.github.io/posts/muon): the matrices inside the decoder layers are
updated by their orthogonalised momentum, everything else by AdamW."""

from typing import Annotated, Literal

from pydantic import Field

from toolkit.optimizers.base import Ledger, OptimizerKind, Product, Shape, WholeTensors
from toolkit.optimizers.tensors import is_layer_matrix
from toolkit.recipe.section import Fraction, Section


class MuonSection(Section):
    """Muon (https://kellerjordan.github.io/posts/muon), as `torch.optim.Muon` computes it."""

    momentum: Fraction = 0.95
    """Decay rate of the momentum."""
    nesterov: bool = True
    """Nesterov momentum: the gradient is added to the momentum once more before
    orthogonalisation."""
    ns_steps: Annotated[int, Field(ge=1, le=99)] = 5
    """Steps of the Newton-Schulz iteration that orthogonalises the momentum."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The learning rate of a matrix [m, n]: `match_rms_adamw` multiplies it by
    0.2 √max(m, n), which makes updates as large as AdamW's, so that rates for AdamW can be
    used; `original` by √max(1, m / n)."""


def _newton_schulz(shape: Shape, own: MuonSection) -> tuple[int, tuple[Product, ...]]:
    """Of a matrix x with m ≤ n, each step computes x xᵀ, its square, and its product with x."""
    m, n = sorted(shape)
    return own.ns_steps, ((m, m, n), (m, m, m), (m, n, m))


MUON = OptimizerKind(
    title="Muon",
    about="`muon` orthogonalises the updates of the weight matrices inside the decoder layers; "
    "embeddings, head, norms and biases are updated by AdamW with the same learning rate.",
    section=MuonSection,
    whole=WholeTensors(
        "toolkit.engines.muon:Muon",
        is_layer_matrix,
        moments=("exp_avg",),
        sent="bfloat16",
        by_replicas=False,
        products=_newton_schulz,
    ),
    reference="toolkit.engines.muon:reference",
    ledger=Ledger(
        "Muon and AdamW with fp32 weights and moments",
        exact=("Muon", "whole matrices of the checkpoint are orthogonalised, each on one rank"),
        amplified=(
            "Newton-Schulz in bf16",
            "as in torch.optim.Muon: another last digit of a gradient may flip a bit there",
        ),
    ),
    no_adapter="what is trained is a product of two matrices, and to orthogonalise each factor "
    "is not to orthogonalise the update",
    # It rounds to bf16 before it orthogonalises: 1e-3 turned 1e-7 into 4e-5 in 20 steps.
    largest_rate=5e-5,
)
"""`optimizer.name: muon`."""
