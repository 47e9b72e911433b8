"""Layout: how a global batch and a model are spread over ranks, and its arithmetic."""

from dataclasses import dataclass
from typing import Literal

Placement = Literal["none", "cpu", "nvme"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and batch split; `world = dp · tp · pp · cp`."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    zero_stage: Literal[0, 1, 2, 3] = 0
    offload_optimizer: Placement = "none"
    offload_parameters: Placement = "none"
    recompute: Recompute = "none"
    micro_batch: int = 1
    gradient_accumulation: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batch * self.gradient_accumulation * self.dp
