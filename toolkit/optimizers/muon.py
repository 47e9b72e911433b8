"""Muon (https://kellerjordan.github.io/posts/muon): the matrices inside the decoder layers are
updated by their orthogonalised momentum, everything else by AdamW."""

from toolkit.optimizers.base import OptimizerKind, WholeTensors, is_layer_matrix

MUON = OptimizerKind(
    title="Muon",
    whole=WholeTensors(
        "toolkit.engines.muon:Muon",
        is_layer_matrix,
        moments=("exp_avg",),
        sent="bfloat16",
        by_replicas=False,
    ),
    reference="toolkit.engines.muon:reference",
    amplified=(
        "Newton-Schulz in bf16",
        "as in torch.optim.Muon: another last digit of a gradient may flip a bit there",
    ),
    no_adapter="what is trained is a product of two matrices, and to orthogonalise each factor "
    "is not to orthogonalise the update",
    # It rounds to bf16 before it orthogonalises: 1e-3 turned 1e-7 into 4e-5 in 20 steps.
    largest_rate=5e-5,
)
"""`optimizer.name: muon`."""
