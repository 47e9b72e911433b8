"""`dmt launch`: mistakes on its command line."""

import sys
from types import ModuleType

from tests.processes import ROOT
from toolkit.cli import entry, main


def test_an_empty_run_directory_is_one_error(capsys):
    """It meant the current directory."""
    assert main.main(["launch", "recipe.yaml", "--run-dir", ""]) == 2
    errors = capsys.readouterr().err
    assert "--run-dir" in errors
    assert "it is empty" in errors


def test_ctrl_c_while_importing_is_quiet(monkeypatch):
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    module = ModuleType("toolkit.cli.main")
    module.__getattr__ = interrupted
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert entry.main() == 130
    assert 'dmt = "toolkit.cli.entry:main"' in (ROOT / "pyproject.toml").read_text()
