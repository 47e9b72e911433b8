"""`dmt` of an installation without `toolkit/extras`."""

import sys
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.errors import EXIT_UNAVAILABLE

TINY = str(ROOT / "recipes/tiny/llama-bytes.yaml")


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("toolkit.extras")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "toolkit.extras", None)


@pytest.mark.usefixtures("without_extras")
@pytest.mark.parametrize("words", ["checkpoint import run.yaml folder", "tune run.yaml"])
def test_what_is_missing_is_one_error(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:
    monkeypatch.chdir(tmp_path)
    captured = dmt(*words.split(), code=EXIT_UNAVAILABLE)
    assert captured.out == "" and not [*tmp_path.iterdir()]
    first, fix = captured.err.splitlines()
    assert first.startswith("dmt: this installation of DMT has no toolkit/extras")
    assert fix.startswith("  fix: install all of it: pip install ")


@pytest.mark.usefixtures("without_extras")
def test_everything_else_works(dmt: Dmt) -> None:
    for verb in ("plan", "check"):
        dmt(verb, TINY)
    assert "tune" in dmt("--help").out
