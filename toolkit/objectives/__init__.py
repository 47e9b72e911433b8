"""What is minimised: one file per objective, chosen by `training.objective`."""

from toolkit.objectives.base import Objective
from toolkit.registry import Registry

__all__ = ["OBJECTIVES", "Objective", "blended_kinds", "data_kinds", "rows_per_sample"]

OBJECTIVES: Registry[type[Objective]] = Registry(
    "dmt.objectives",
    {
        "pretrain": "toolkit.objectives.pretrain:Pretrain",
        "sft": "toolkit.objectives.sft:Sft",
        "dpo": "toolkit.objectives.dpo:Dpo",
        "orpo": "toolkit.objectives.orpo:Orpo",
    },
)


def rows_per_sample(name: str) -> int:
    """Rows of a micro batch that make one sample: `Objective.rows_per_sample`, or 1."""
    return getattr(OBJECTIVES[name], "rows_per_sample", 1)


def data_kinds(name: str) -> tuple[str, ...]:
    """`Objective.data_kinds`; empty where the objective does not restrict its data."""
    return getattr(OBJECTIVES[name], "data_kinds", ())


def blended_kinds(name: str) -> tuple[str, ...]:
    """`Objective.blended_kinds`, none by default."""
    return getattr(OBJECTIVES[name], "blended_kinds", ())
