"""Rehearsals of small recipes, run as the command runs them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.recipe.load import load_recipe
from toolkit.rehearse.layouts import select
from toolkit.rehearse.record import Record
from toolkit.rehearse.rehearsal import Options, Outcome, prepare, run

LLAMA = ROOT / "recipes/tiny/llama-bytes.yaml"
Rehearse = Callable[..., dict[str, Outcome]]


@pytest.fixture
def rehearse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Rehearse layouts of a recipe; outcomes by name."""
    monkeypatch.chdir(ROOT)  # a test's own worker is a module of `tests`

    def outcomes(
        *names: str, recipe: Path = LLAMA, overrides: Sequence[str] = (), **options: object
    ) -> dict[str, Outcome]:
        chosen = Options(**{"steps": 3, **options})  # type: ignore[arg-type]
        rehearsal = prepare(load_recipe(recipe, overrides), chosen)
        reference, *found = run(rehearsal, select(rehearsal.layouts, names), chosen, tmp_path)
        assert isinstance(reference, Record)
        assert len(reference.loss) == len(reference.grad_norm) == chosen.steps
        return {item.candidate.name: item for item in found if isinstance(item, Outcome)}

    return outcomes
