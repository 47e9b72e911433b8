"""The documentation as a site: built without warnings, and looked at in Chromium."""

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import Tab, browser
from tests.processes import ROOT

PAGES = ("index.html", "tutorials/first-run.html", "recipe.html")
"""The first page, a tutorial and the longest page."""
WIDTHS = {"desktop": (1400, 1000), "mobile": (390, 844)}


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """What was asked for is known from the browser."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


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
    assert len(links) > 15 and all((site / link).is_file() for link in links)


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as tab:
        yield tab


@pytest.mark.parametrize("width", WIDTHS)
def test_in_a_browser(width: str, site: Path, tab: Tab) -> None:
    size = {"width": WIDTHS[width][0], "height": WIDTHS[width][1], "deviceScaleFactor": 1}
    tab.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {**size, "mobile": width == "mobile"}
    )
    with served(site) as address:
        for page in PAGES:
            tab.driver.get(f"{address}/{page}")
            tab.wait("document.readyState === 'complete'", page)
            pictures = "[...document.querySelectorAll('article img')]"
            tab.wait(f"{pictures}.every((one) => one.complete && one.naturalWidth)", "pictures")
            assert tab.errors() == [] and tab.inaccessible() == [], page
            assert not tab.run("document.documentElement.scrollWidth > innerWidth"), page
            assert all(one.startswith((address, "data:")) for one in tab.requests()), page
        if width == "desktop":
            field = tab.driver.find_element("css selector", "input.md-search__input")
            field.send_keys("micro batch")
            tab.wait(
                "document.querySelector('.md-search-result__item')", "what the search found"
            )


def test_diagrams_are_pictures(site: Path) -> None:
    page = (site / "architecture.html").read_text(encoding="utf-8")
    assert "mermaid" not in page and "pictures/diagram-" in page
