"""A recipe with its plan, to compare files with."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.foreign.compare import FileComparison, against
from toolkit.intake.load import load_recipe
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import decide

TINY = ROOT / "recipes/tiny/llama-bytes.yaml"
FILES = ROOT / "tests/foreign/files"


@dataclass(frozen=True)
class Planned:
    """A recipe and what was decided about it."""

    recipe: Recipe
    plan: Plan

    @classmethod
    def of(cls, path: Path, *overrides: str) -> "Planned":
        assignment = decide(load_recipe(path, overrides), None)
        return cls(assignment.recipe, assignment.plan)

    def against(self, path: Path) -> FileComparison:
        return against(path, self.recipe, self.plan)

    def wrong(self, path: Path) -> dict[str, str]:
        """The settings that disagree: their name → ours."""
        return {row.name: row.key for row in self.against(path).settings if not row.agrees}


@pytest.fixture(scope="session")
def tiny() -> Planned:
    """DeepSpeed's ZeRO-2 on two CPU processes, fp32, micro batch 8."""
    return Planned.of(TINY)
