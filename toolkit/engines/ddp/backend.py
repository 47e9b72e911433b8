"""Backend of engine `ddp`: everything except training."""

from toolkit.backend import ANY, Backend, Rehearsed, Support
from toolkit.engines.ddp.accelerate import DdpInAccelerate
from toolkit.layout import Layout, Precision
from toolkit.plan.cost.engine import FP32_BYTES, EngineCost
from toolkit.plan.cost.stages import StageShare


class DdpCost(EngineCost):
    """DistributedDataParallel in fp32, replicated FSDP2 in 16 bits."""

    def buffers(self, layout: Layout, width: int, share: StageShare) -> float:
        """The 16-bit copy of the weights, and the gradients of the largest unit that is reduced
        at once (a layer, or the vocabulary) in 16 bits and in fp32."""
        if width == FP32_BYTES:
            return 0.0
        unit = max((share.dense + share.experts) / share.layers, share.trained.output)
        return width * share.parameters + (width + FP32_BYTES) * unit


class DdpBackend(Backend):
    """Every rank holds the whole model."""

    name = "ddp"
    title = "PyTorch's DDP"
    engine = "toolkit.engines.ddp.engine:build"
    supports = {
        "hf": Support(degrees={"context": ANY}, kernel_stages=(0,)),
    }
    distributed_types = ("NO", "MULTI_CPU", "MULTI_GPU")
    accelerate = DdpInAccelerate()
    cost = DdpCost()
    rehearsals = (
        Rehearsed("ddp", "hf", Layout(dp=2)),
        Rehearsed("ddp-cp2", "hf", Layout(cp=2)),
    )

    def rehearsed_alone(self, precision: Precision) -> bool:
        """DDP's reducer."""
        return precision == "fp32"


BACKEND = DdpBackend()
