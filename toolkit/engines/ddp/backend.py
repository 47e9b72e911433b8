"""Backend of engine `ddp`: everything except training."""

from toolkit.backend import ANY, Backend, InAccelerate, Rehearsed, Support
from toolkit.layout import Layout
from toolkit.plan.cost.engine import FP32_BYTES, EngineCost
from toolkit.plan.cost.stages import StageShare


class DdpCost(EngineCost):
    """FSDP2 with a copy of the model on every rank."""

    def buffers(self, layout: Layout, width: int, share: StageShare) -> float:
        """The gathered copy of the trained weights, and the gradients of the largest unit that
        is reduced at once (a layer, or the vocabulary) in compute precision and in fp32."""
        trained = share.trained
        vocabulary = max(trained.output, trained.vocabulary - trained.output)
        unit = max((trained.dense + trained.experts) / share.layers, vocabulary)
        return width * trained.parameters + (width + FP32_BYTES) * unit


class DdpBackend(Backend):
    """Every rank holds the whole model: FSDP2 with a replica on each."""

    name = "ddp"
    engine = "toolkit.engines.fsdp.engine:DdpEngine"
    supports = {
        "hf": Support(degrees={"context": ANY}, kernel_stages=(0,)),
    }
    distributed_types = ("NO", "MULTI_CPU", "MULTI_GPU")
    accelerate = InAccelerate()
    cost = DdpCost()
    rehearsals = (
        Rehearsed("ddp", "hf", Layout(dp=2)),
        Rehearsed("ddp-cp2", "hf", Layout(cp=2)),
    )


BACKEND = DdpBackend()
