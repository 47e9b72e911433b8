"""Rehearsals of small recipes, run as the command runs them."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import mkdtemp

import psutil
import pytest

from tests.processes import ROOT
from tests.warm import REGISTER, SUBPROCESS, registered
from toolkit.intake.load import load_recipe
from toolkit.rehearse.comparison import Record
from toolkit.rehearse.layouts import select
from toolkit.rehearse.rehearsal import LayoutResult, Options, prepare, run

LLAMA = ROOT / "recipes/tiny/llama-bytes.yaml"
Rehearse = Callable[..., dict[str, LayoutResult]]


@pytest.fixture
def warm_ranks(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Collection[psutil.Process]]:
    """Ranks of this process's rehearsals are forked; those that are left."""
    folder = tmp_path_factory.mktemp("register")
    monkeypatch.setenv(REGISTER, str(folder))
    monkeypatch.setattr("toolkit.launchers.ranks.subprocess", SUBPROCESS)
    monkeypatch.chdir(ROOT)  # a test's own worker is a module of `tests`
    return lambda: registered(folder).keys()


@pytest.fixture
def rehearse(tmp_path: Path, request: pytest.FixtureRequest) -> Rehearse:
    """Rehearse layouts of a recipe; outcomes by name."""
    request.getfixturevalue("warm_ranks")

    def outcomes(
        *names: str, recipe: Path = LLAMA, overrides: Sequence[str] = (), **options: object
    ) -> dict[str, LayoutResult]:
        chosen = Options(**{"steps": 3, **options})  # type: ignore[arg-type]
        rehearsal = prepare(load_recipe(recipe, overrides), chosen)
        chosen_layouts = select(rehearsal.layouts, names)
        folder = Path(mkdtemp(dir=tmp_path))  # a test may rehearse twice
        reference, *found = run(rehearsal, chosen_layouts, chosen, folder)
        assert isinstance(reference, Record)
        assert len(reference.loss) == len(reference.grad_norm) == chosen.steps
        return {item.candidate.name: item for item in found if isinstance(item, LayoutResult)}

    return outcomes
