"""`dmt` of an installation without `toolkit/extras`."""

import sys

import pytest

from tests.dmt import Dmt
from tests.processes import ROOT
from toolkit.errors import BackendUnavailable
from toolkit.optimizers.base import OPTIMIZERS
from toolkit.registry import Registry

TINY = str(ROOT / "recipes/tiny/llama-bytes.yaml")


@pytest.fixture
def without_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("toolkit.extras")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "toolkit.extras", None)


@pytest.mark.usefixtures("without_extras")
def test_everything_else_works(dmt: Dmt) -> None:
    """Nothing else imports them: tests/test_imports.py. Their optimizers are no names."""
    for verb in ("plan", "check"):
        dmt(verb, TINY)
    assert "tune" in dmt("--help").out
    here = Registry("dmt.optimizers", OPTIMIZERS._own)
    assert {"adamw_8bit"} == {*OPTIMIZERS.names} - {*here.names}
    with pytest.raises(BackendUnavailable, match="has no toolkit/extras"):
        here["adamw_8bit"]
