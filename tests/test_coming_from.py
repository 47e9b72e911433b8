"""docs/coming-from.md: its commands run in a folder with the file that it shows, its tables are
those that the import uses, and the settings that it names exist."""

import re
import shlex
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.foreign.docs import PAGE, page
from toolkit.recipe.schema import Recipe
from toolkit.recipe.words import settings

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # the recipe is for GPUs
    (name, content), *_ = re.findall(r'^```yaml title="([^"]+)"\n(.*?)^```$', TEXT, re.M | re.S)
    Path(name).write_text(content, encoding="utf-8")
    commands = re.findall(r"^\$ dmt (.*)$", TEXT, re.M)
    assert commands
    for command in commands:
        assert main(shlex.split(command)) == 0, capfd.readouterr().err


def test_the_tables_are_those_of_the_import() -> None:
    assert page() == TEXT, "python -m toolkit.foreign.docs writes them"


def test_settings_exist() -> None:
    text = re.sub(r"^\| .+? \| ", "", TEXT, flags=re.M)  # their names
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:\[\d\])?(?:: [^`]+)?`", text)
    ours = {name for name in named if name.split(".")[0] in Recipe.model_fields}
    assert len(ours) > 40
    known = settings().keys()
    assert {
        name for name in ours if name not in known and name.split(".")[1] != "train"
    } == set()
    assert (ROOT / "docs" / "coming-from.md") == PAGE
