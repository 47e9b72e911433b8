"""AdamW whose two moments are 8-bit codes, with one scale for every 256 of them.

The moments of a tensor of the Hugging Face checkpoint, flattened, are quantised in blocks of
256 (Dettmers et al., arXiv:2110.02861), and bitsandbytes computes the updates, as its
`AdamW8bit` does. As there, tensors of fewer than 4,096 elements have fp32 moments, and so do
embeddings, as in Hugging Face's Trainer: the engine's AdamW updates these.
"""

from collections.abc import Mapping
from functools import cache
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from toolkit.checkpoint.shards import CODES, QUANTITIES, SCALES, dtype_of
from toolkit.errors import BackendUnavailable
from toolkit.models.families.tensors import Block
from toolkit.models.matrices import has_codes, scale_count
from toolkit.models.parameter_groups import is_embedding
from toolkit.recipe.schema import OptimizerSection
from toolkit.system.install import install


class AdamW8bit:
    """See `UpdateRule`; a tensor is quantised as a whole, and its owner keeps all states."""

    moments: ClassVar[tuple[str, ...]] = ()
    sent: ClassVar[torch.dtype] = torch.float32
    by_replicas: ClassVar[bool] = True

    def __init__(self, settings: OptimizerSection) -> None:
        """Raises BackendUnavailable without bitsandbytes."""
        self.settings = settings
        self.states: dict[str, dict[str, Tensor]] = {}
        self._bitsandbytes = operators()

    def takes(self, block: Block) -> bool:
        """See `UpdateRule.takes`."""
        return not is_embedding(block.tensor)

    def cost(self, shape: tuple[int, ...]) -> int:
        """See `UpdateRule.cost`."""
        return prod(shape)

    def own(self, tensor: str, shape: tuple[int, ...], device: torch.device) -> None:
        """See `UpdateRule.own`."""
        if has_codes(tensor, shape):
            scales = scale_count(shape)
            found = {name: torch.zeros(shape, dtype=dtype_of(name)) for name in CODES}
            found |= {name: torch.zeros(scales) for name in SCALES}
        else:
            found = {name: torch.zeros(shape) for name in QUANTITIES[1:]}
        self.states[tensor] = {name: values.to(device) for name, values in found.items()}

    def accumulate(self, gradient: Tensor, state: Mapping[str, Tensor]) -> None:
        """See `UpdateRule.accumulate`: nothing."""

    def update(self, tensor: str, whole: Tensor, step: int) -> Tensor:
        """See `UpdateRule.update`."""
        first, second, *scales = self.states[tensor].values()
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

    def rate(self, shape: tuple[int, ...]) -> float:  # noqa: ARG002
        """See `UpdateRule.rate`."""
        return 1.0


def operators() -> Any:
    """bitsandbytes' own. Raises BackendUnavailable if it cannot be imported."""
    try:
        import bitsandbytes.functional as functional
    except ImportError as error:
        raise BackendUnavailable(
            f"optimizer.name is adamw_8bit: bitsandbytes cannot be imported ({error})",
            fix=f"{install('8bit')}, or set optimizer.name to adamw",
        ) from error
    return functional


@cache
def _maps(device: torch.device) -> tuple[Tensor, Tensor]:
    """Values from -1 to 1 of the codes of the first and of the second moment: [256] each."""
    new = operators().create_dynamic_map
    return new(signed=True).to(device), new(signed=False).to(device)
