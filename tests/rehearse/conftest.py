"""Rehearsals of small recipes, run as the command runs them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.processes import ROOT
from tests.rehearse.bugs import BUG
from tests.warm import REGISTER, SUBPROCESS, registered
from toolkit.intake.load import load_recipe
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
def rehearse(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rehearse:
    """Rehearse layouts of a recipe, perhaps with a bug; outcomes by name."""
    request.getfixturevalue("warm_ranks")

    def outcomes(
        *names: str,
        recipe: Path = LLAMA,
        overrides: Sequence[str] = (),
        steps: int = 3,
        bug: str = "",
    ) -> dict[str, LayoutResult]:
        chosen = Options(steps=steps)
        if bug:
            monkeypatch.setenv(BUG, bug)
            chosen = replace(chosen, worker="tests.rehearse.bugs")
        rehearsal = prepare(load_recipe(recipe, overrides), chosen)
        chosen_layouts = select(rehearsal.layouts, names)
        found = run(rehearsal, chosen_layouts, chosen)
        assert len(found.reference.loss) == len(found.reference.grad_norm) == chosen.steps
        return {item.candidate.name: item for item in found.layouts}

    return outcomes
