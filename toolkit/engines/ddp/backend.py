"""Engine `ddp` for everyone who does not train with it."""

from toolkit.backend import Backend, Rehearsed, Support
from toolkit.engines.ddp.accelerate import DdpInAccelerate
from toolkit.layout import Layout
from toolkit.plan.cost.engine import EngineCost


class DdpBackend(Backend):
    """torch's DistributedDataParallel: every rank holds the whole model."""

    name = "ddp"
    title = "PyTorch's DDP"
    engine = "toolkit.engines.ddp.engine:DdpEngine"
    supports = {"hf": Support(preference=20)}
    distributed_types = ("NO", "MULTI_CPU", "MULTI_GPU")
    accelerate = DdpInAccelerate()
    cost = EngineCost()
    rehearsals = (Rehearsed("ddp", "hf", Layout(dp=2)),)


BACKEND = DdpBackend()
