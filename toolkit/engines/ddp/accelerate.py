"""Engine `ddp` in Accelerate: its default with several processes."""

from toolkit.backend import InAccelerate
from toolkit.layout import Layout


class DdpInAccelerate(InAccelerate):
    """The defaults, and their file."""

    common = {"ddp": Layout()}
