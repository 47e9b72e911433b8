"""The half of the toy engine that trains."""

from toolkit.engines.fsdp.engine import DdpEngine
from toolkit.engines.setup import EngineSetup


class ToyEngine(DdpEngine):
    """A copy on every rank, which reads `toy.json`."""

    def __init__(self, setup: EngineSetup) -> None:
        assert setup.engine_config == {"ranks": setup.ranks.world, "precision": "fp32"}
        print(f"rank {setup.ranks.rank} trains with the toy")
        super().__init__(setup)
