"""`dmt` of an installation without `toolkit/extras`."""

import sys
from pathlib import Path

import pytest

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.errors import EXIT_UNAVAILABLE
from toolkit.registry import Registry

TINY = str(ROOT / "recipes/tiny/llama-bytes.yaml")
OPTIONS = {"report --html": "toolkit.extras.page:write_page"}


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("toolkit.extras")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "toolkit.extras", None)
    monkeypatch.setattr("toolkit.cli.extras.OPTIONS", Registry("dmt.options", OPTIONS))


@pytest.mark.usefixtures("without_extras")
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["checkpoint", "import", "run.yaml", "folder"], "dmt checkpoint import"),
    ],
)
def test_what_is_missing_is_one_error(
    arguments: list[str], what: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, dmt: Dmt
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    captured = dmt(*arguments, code=EXIT_UNAVAILABLE)
    assert captured.out == "" and not [*tmp_path.iterdir()]
    first, fix = captured.err.splitlines()
    assert first == f"dmt: {what}: this installation of DMT has no toolkit/extras"
    assert fix.startswith("  fix: install all of it: pip install ")


@pytest.mark.usefixtures("without_extras")
def test_everything_else_works(dmt: Dmt) -> None:
    for verb in ("plan", "check"):
        dmt(verb, TINY)
    assert "tune" in dmt("--help").out
