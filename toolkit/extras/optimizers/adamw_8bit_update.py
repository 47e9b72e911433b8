"""The update of AdamW with 8-bit moments: codes, with one scale for every 256 of them.

The moments of a tensor of the Hugging Face checkpoint, flattened, are quantised in blocks of
256 (Dettmers et al., arXiv:2110.02861), and bitsandbytes computes the updates, as its
`AdamW8bit` does. As there, tensors of fewer than 4,096 elements have fp32 moments, and so do
embeddings, as in Hugging Face's Trainer: the engine's AdamW updates these.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from toolkit.engines.owners import UpdateRule
from toolkit.optimizers.base import Trained
from toolkit.recipe.schema import OptimizerSection
from toolkit.system.install import optional


class AdamW8bit(UpdateRule):
    """A tensor is quantised as a whole, and its owner keeps all states."""

    def __init__(self, settings: OptimizerSection) -> None:
        """Raises BackendUnavailable without bitsandbytes."""
        super().__init__(settings)
        self._bitsandbytes = operators()

    def update(self, whole: Tensor, states: Mapping[str, Tensor], step: int) -> Tensor:
        first, second, *scales = states.values()
        (beta1, beta2), eps = self.settings.betas, self.settings.eps
        gradient = whole.contiguous()
        update = torch.zeros_like(gradient)
        if scales:
            self._bitsandbytes.optimizer_update_8bit_blockwise(
                "adam", gradient, update, first, second, beta1, beta2, 0.0, 0.0, eps, step,
                -1.0, *_maps(whole.device), *scales,
            )  # fmt: skip
        else:
            self._bitsandbytes.optimizer_update_32bit(
                "adam", gradient, update, first, beta1, eps, step, -1.0, second, beta2
            )
        return update


def operators() -> Any:
    """bitsandbytes' operators. Raises BackendUnavailable if it cannot be imported."""
    what = "optimizer.name is adamw_8bit: bitsandbytes"
    otherwise = ", or set optimizer.name to adamw"
    return optional("bitsandbytes.functional", "8bit", what, otherwise)


@cache
def _maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Values from -1 to 1 of the codes of the first and of the second moment: [256] each."""
    new = operators().create_dynamic_map
    return new(signed=True).to(device), new(signed=False).to(device)


def reference(
    settings: OptimizerSection, parameters: Sequence[Trained]
) -> list[torch.optim.Optimizer]:
    """bitsandbytes' optimizer as in transformers' Trainer, with embeddings in 32 bits."""
    from bitsandbytes.optim import AdamW8bit as Theirs
    from bitsandbytes.optim import AdamW32bit

    kinds = ((Theirs, False), (AdamW32bit, True))
    groups = {
        kind: [one.group for one in parameters if one.embedding == embedding]
        for kind, embedding in kinds
    }
    return [
        kind(members, betas=settings.betas, eps=settings.eps)
        for kind, members in groups.items()
        if members
    ]
