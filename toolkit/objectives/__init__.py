"""What is minimised: one class per objective, chosen by `training.objective`."""

from toolkit.objectives.base import Objective
from toolkit.registry import Registry

__all__ = ["OBJECTIVES", "Objective"]

OBJECTIVES: Registry[type[Objective]] = Registry(
    "dmt.objectives",
    {
        "pretrain": "toolkit.objectives.pretrain:Pretrain",
        "sft": "toolkit.objectives.pretrain:Sft",
        "dpo": "toolkit.objectives.dpo:Dpo",
        "orpo": "toolkit.objectives.orpo:Orpo",
    },
    base=Objective,
)
