"""A recipe with its plan, to compare files and environments with."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.foreign import Report, against
from toolkit.intake.load import load_recipe
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import decide

TINY = ROOT / "recipes/tiny/llama-bytes.yaml"


@dataclass(frozen=True)
class Planned:
    """A recipe and what was decided about it."""

    recipe: Recipe
    plan: Plan

    @classmethod
    def of(cls, path: Path, *overrides: str) -> "Planned":
        assignment = decide(load_recipe(path, overrides), None)
        return cls(assignment.recipe, assignment.plan)

    def against(self, path: Path) -> Report:
        """Compare with one file."""
        (report,) = against(str(path), self.recipe, self.plan)
        return report

    def conflicts(self, path: Path) -> dict[str, tuple[str, str]]:
        """What disagrees: the other's name → the recipe's value and the other's."""
        found = self.against(path).conflicts
        return {row.name: (row.recipe, row.other) for row in found}


@pytest.fixture(scope="session")
def tiny() -> Planned:
    """DeepSpeed's ZeRO-2 on two CPU processes, fp32, micro batch 8."""
    return Planned.of(TINY)
