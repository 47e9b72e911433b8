"""Engine `ddp` for everyone who does not train with it."""

from toolkit.backend import Backend, Support
from toolkit.plan.cost.engine import EngineCost


class DdpBackend(Backend):
    """torch's DistributedDataParallel: every rank holds the whole model."""

    name = "ddp"
    title = "PyTorch's DDP"
    engine = "toolkit.engines.torch.ddp:DdpEngine"
    supports = {"hf": Support(preference=20)}
    cost = EngineCost()


BACKEND = DdpBackend()
