"""What is minimised: one file per objective, chosen by `training.objective`."""

from toolkit.objectives.base import Objective
from toolkit.registry import Registry

__all__ = ["OBJECTIVES", "Objective"]

OBJECTIVES: Registry[type[Objective]] = Registry(
    "dmt.objectives", {"pretrain": "toolkit.objectives.pretrain:Pretrain"}
)
