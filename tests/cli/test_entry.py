"""`dmt` before it has imported its verbs."""

import sys
from types import ModuleType

from tests.processes import ROOT
from toolkit.cli import entry


def test_ctrl_c_while_importing_is_quiet(monkeypatch):
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    module = ModuleType("toolkit.cli.main")
    module.__getattr__ = interrupted
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert entry.main() == 130
    assert 'dmt = "toolkit.cli.entry:main"' in (ROOT / "pyproject.toml").read_text()
