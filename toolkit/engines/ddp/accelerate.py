"""Engine `ddp` in Accelerate: what it does with several processes unless it is given more."""

from toolkit.engines.in_accelerate import InAccelerate
from toolkit.layout import Layout


class DdpInAccelerate(InAccelerate):
    """The defaults, and their file."""

    common = {"ddp": Layout()}
