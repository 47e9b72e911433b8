"""What an engine is built from, and the one line per engine that names its class."""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.engines.base import Engine
from toolkit.plan.layout import Layout
from toolkit.recipe.schema import OptimizerSection

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from toolkit.engines.distributed import Ranks
    from toolkit.models.weights import WeightSource

ENGINES = {
    "ddp": "toolkit.engines.ddp:DdpEngine",
    "deepspeed": "toolkit.engines.deepspeed:DeepSpeedEngine",
}


@dataclass(frozen=True)
class EngineSetup:
    """Everything an engine needs, and nothing else of the recipe."""

    model_config: "PretrainedConfig"
    weights: "WeightSource"
    layout: Layout
    precision: str
    optimizer: OptimizerSection
    ranks: "Ranks"
    engine_config: dict[str, Any]
    """The rendered backend configuration (DeepSpeed's JSON); empty for ddp."""


def build_engine(name: str, setup: EngineSetup) -> Engine:
    """Build the engine `name` on this rank; collective."""
    module, _, attribute = ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), attribute)(setup)
    return engine
