"""The pages of docs/coming-from: their commands run as they stand there, in a folder with the
files that the page shows, and the settings that they name exist."""

import re
import shlex
from pathlib import Path

import pytest

from tests.processes import ROOT
from toolkit.cli.main import main
from toolkit.recipe.describe import Setting
from toolkit.recipe.schema import Recipe
from toolkit.recipe.section import Section

FOLDER = ROOT / "docs" / "coming-from"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_conversion(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)  # the recipes are for GPUs
    for name, content in FILE.findall(text):
        Path(name).write_text(content, encoding="utf-8")
    commands = [
        line.removeprefix("$ dmt ")
        for block in BLOCK.findall(text)
        for line in block.splitlines()
        if line.startswith("$")
    ]
    assert commands
    for command in commands:
        assert main(shlex.split(command, comments=True)) == 0, capfd.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_settings_exist(page: Path) -> None:
    text = re.sub(r"^\| .+? \| ", "", page.read_text("utf-8"), flags=re.MULTILINE)  # theirs
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]+)?`", text)
    ours = {name for name in named if name.split(".")[0] in Recipe.model_fields}
    assert ours
    missing = {name for name in ours if not is_setting(Recipe, name.split("."))}
    assert not missing


def is_setting(section: type[Section], names: list[str]) -> bool:
    """Whether a dotted path leads through the schema."""
    info = section.model_fields.get(names[0])
    if info is None or len(names) == 1:
        return info is not None
    return any(is_setting(one, names[1:]) for one in Setting(names[0], info).sections)


def test_index_lists_every_page() -> None:
    listed = re.findall(r"\]\(([a-z-]+\.md)\)", (FOLDER / "index.md").read_text("utf-8"))
    assert sorted(listed) == [page.name for page in PAGES]
