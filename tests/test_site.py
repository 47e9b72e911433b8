"""The documentation as a site: built without warnings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds; a link to nowhere and a page that is not listed are errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def test_agents_find_the_markdown(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 15 and all((site / link.partition("#")[0]).is_file() for link in links)


def test_diagrams_are_pictures(site: Path) -> None:
    page = (site / "architecture.html").read_text(encoding="utf-8")
    assert "mermaid" not in page and "pictures/diagram-" in page
