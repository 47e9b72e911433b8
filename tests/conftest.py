"""Fixtures for every test: no network, no leftovers of the user's environment."""

import os
import shlex
import shutil
import signal
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

# Threads that wait leave the cores to other tests; OpenMP reads it when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest

from tests import needs
from tests.dmt import Dmt, Printed
from toolkit.engines.deepspeed.ops import build, preflight, put_ninja_on_path

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[name] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")
hypothesis.settings.register_profile("dmt", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("dmt")
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, too: tests send it
put_ninja_on_path()  # what another ninja has built is built again, by every test that loads it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no worker ends minutes after the others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture is made, look for what the test's `needs` marks name."""
    for mark in item.iter_markers("needs"):
        needs.require(*mark.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A report can be sent to pytest-xdist's controller, whatever a test printed or logged."""
    report = yield
    report.sections = [
        (title, text.encode(errors="backslashreplace").decode())
        for title, text in report.sections
    ]
    return report


@pytest.fixture
def dmt(capsys: pytest.CaptureFixture[str]) -> Dmt:
    """Runs `dmt` with words, asserts its exit code and returns what it printed."""
    from toolkit.cli.main import main

    def run(*words: object, code: int = 0) -> Printed:
        capsys.readouterr()
        ended = main([*map(str, words)])
        printed = Printed(*capsys.readouterr())
        assert ended == code, printed
        return printed

    return run


@pytest.fixture(scope="session")
def cpu_adam() -> None:
    """DeepSpeed's AdamW for offload, built once per machine: about a minute."""
    needs.require(*needs.COMPILER)
    _built("cpu_adam")


@pytest.fixture(scope="session")
def async_io() -> None:
    """What offload to NVMe needs, built once per machine: minutes."""
    needs.require(*needs.COMPILER, "libaio-dev")
    _built("cpu_adam", "pin_memory", "async_io")


def _built(*ops: str) -> None:
    """Build without the debugging information that DeepSpeed asks for: half of the time.

    A compiler on PATH leaves it out, so ninja sees the same commands, and no later load builds
    again.
    """
    preflight(ops)
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        if (compiler := shutil.which("c++")) and "CXX" not in os.environ:
            shorter = Path(folder, "c++")
            shorter.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -g0\n')
            shorter.chmod(0o755)
            patch.setenv("PATH", folder, prepend=os.pathsep)
        build(ops, print)
