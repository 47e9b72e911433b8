"""Adafactor: one average per row and per column of a matrix instead of two moments."""

from toolkit.optimizers.base import Ledger, OptimizerKind, Quantity, WholeTensors
from toolkit.recipe.section import PositiveFloat, Section


class AdafactorSection(Section):
    """Adafactor (arXiv:1804.04235), as transformers computes it with `scale_parameter=False`
    and `relative_step=False`."""

    decay: PositiveFloat = 0.8
    """The averages of squares weigh the gradient of step t by t^-decay."""
    eps: PositiveFloat = 1.0e-30
    """Added to squared gradients."""
    clip: PositiveFloat = 1.0
    """Largest root mean square of the update of a tensor, before the learning rate."""


_FACTORS = {
    "exp_avg_sq_row": Quantity(shape=lambda shape: shape[:1]),
    "exp_avg_sq_col": Quantity(shape=lambda shape: shape[1:]),
}

ADAFACTOR = OptimizerKind(
    title="Adafactor",
    about="`adafactor` keeps an average per row and per column of a matrix instead of two "
    "moments.",
    section=AdafactorSection,
    unused=("betas", "eps"),
    whole=WholeTensors(
        "toolkit.extras.optimizers.adafactor_update:Adafactor",
        quantities=_FACTORS,
        owned=lambda shape: tuple(_FACTORS) if len(shape) > 1 else ("exp_avg_sq",),
        # The gradient squared (8) and averaged over both axes (8), the factors' product (4)
        # times the gradient (12), its norm (4), the division (8), the copy of the result (4).
        moved_bytes=48,
    ),
    reference="toolkit.extras.optimizers.adafactor_update:reference",
    ledger=Ledger(
        "Adafactor with fp32 weights and moments",
        exact=("Adafactor", "whole tensors of the checkpoint are updated, each on one rank"),
    ),
    no_adapter="the states of so few parameters are small, there is nothing to factor",
    gives_up="AdamW",
)
"""`optimizer.name: adafactor`."""
