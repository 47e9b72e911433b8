"""What is minimised: one class per objective, chosen by `training.objective`."""

from toolkit.objectives.base import Objective
from toolkit.registry import Registry

__all__ = ["OBJECTIVES", "Objective"]

OBJECTIVES: Registry[type[Objective]] = Registry(
    "dmt.objectives",
    {
        "pretrain": "toolkit.objectives.base:Pretrain",
        "sft": "toolkit.objectives.base:Sft",
        "dpo": "toolkit.objectives.preference:Dpo",
        "orpo": "toolkit.objectives.preference:Orpo",
    },
    base=Objective,
)
