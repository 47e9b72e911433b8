"""Engine `ddp` in Accelerate."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.engines.in_accelerate import InAccelerate
from toolkit.layout import Layout
from toolkit.recipe.dump import dump

if TYPE_CHECKING:
    from torch import nn


class DdpInAccelerate(InAccelerate):
    """DDP is what Accelerate does with several processes unless it is told more."""

    common = {"ddp": Layout()}

    def distributed_type(self, world: int) -> str:
        """See `InAccelerate`. On a CPU, Accelerate's MULTI_CPU starts one process only."""
        return "MULTI_GPU" if world > 1 else "NO"

    def section(self, layout: Layout, precision: str, config: Mapping[str, Any]) -> str:
        """See `InAccelerate`."""
        return dump({"mixed_precision": precision}, flow=False)

    def accelerator(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """See `InAccelerate`."""
        import torch

        return {"cpu": not torch.cuda.is_available()}

    def made(self, model: "nn.Module", layout: Layout) -> tuple[str, bool]:
        """See `InAccelerate`. A model that does not train needs no DDP, one process neither."""
        from torch.nn.parallel import DistributedDataParallel

        trains = any(parameter.requires_grad for parameter in model.parameters())
        alone = layout.world == 1 or not trains
        return type(model).__name__, alone or isinstance(model, DistributedDataParallel)
