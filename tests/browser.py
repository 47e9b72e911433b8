"""Debian's Chromium without a window, for tests of pages."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.needs import SEARCH_PATH, require, unmet
from tests.processes import wait_until

if TYPE_CHECKING:
    from selenium.webdriver import Chrome


class Tab:
    """One page, and what its browser says of it."""

    def __init__(self, driver: "Chrome") -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a report, and wait until its charts are drawn."""
        self.driver.get(url)
        self.wait("document.body.dataset.drawn !== undefined", "charts")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self.driver.execute_script(f"return {script}")

    def wait(self, condition: str, what: str) -> None:
        """Until an expression in the page is true."""

        def holds() -> Any:
            assert not (said := self.errors()), said
            return self.run(condition)

        wait_until(holds, what)

    def errors(self) -> list[str]:
        """What the console said since the last call, policy violations included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Everything that was asked for since the last call."""
        messages = [
            json.loads(entry["message"])["message"]
            for entry in self.driver.get_log("performance")
        ]
        return [
            one["params"]["request"]["url"]
            for one in messages
            if one["method"] == "Network.requestWillBeSent"
        ]

    def inaccessible(self) -> list[str]:
        """Serious faults that axe-core finds."""
        from axe_core_python.selenium import Axe

        found = Axe().run(self.driver)["violations"]
        return [
            f"{one['id']}: {node['html'][:120]} {node['failureSummary']}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]


@contextmanager
def browser(*, dark: bool = False, width: int = 1400) -> Iterator[Tab]:
    """A tab; skips the test where Chromium or what drives it is missing."""
    require("chromium", "chromium-driver")
    try:
        import axe_core_python  # noqa: F401
        from selenium import webdriver
    except ImportError as error:
        unmet(f"pip install selenium axe-core-python ({error})")
    from shutil import which

    options = webdriver.ChromeOptions()
    options.binary_location = str(which("chromium", path=SEARCH_PATH))
    for switch in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{switch}")
    options.add_argument(f"--window-size={width},1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(which("chromedriver", path=SEARCH_PATH))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield Tab(driver)
    finally:
        driver.quit()
