"""`kernels.compile: layers` through whole runs of the tiny recipe."""

from pathlib import Path

import pytest

from tests.e2e.product import curve, dmt, events, run, settings
from tests.processes import ROOT

RECIPE = ROOT / "recipes/tiny/llama-bytes.yaml"
SETTINGS = {
    "data.train": '{kind: text, files: ["{stdlib}/a*.py"]}',
    "training.sequence_length": 64,
    "logging": "{every_steps: 1}",
    "schedule": "{name: constant, warmup_steps: 0}",
    "evaluation.every_steps": "null",
    "kernels.compile": "layers",
}


def launch(folder: Path, name: str, **changes: object) -> Path:
    wanted = dmt("launch", RECIPE, "--run-dir", name, *settings(SETTINGS | changes))
    run(wanted, folder, code=0)
    return folder / name


@pytest.mark.soak
def test_resume(tmp_path: Path) -> None:
    """Bitwise the run without a break, though that evaluated where the other began."""
    for steps in (4, 6):
        broken = launch(tmp_path, "broken", **{"training.steps": steps})
    whole = launch(tmp_path, "whole", **{"training.steps": 6, "evaluation.every_steps": 2})
    assert curve(broken) == curve(whole)
    assert events(whole, "evaluation")


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, in one line."""
    monkeypatch.setenv("CXX", "/no/such/compiler")
    ended = run(dmt("launch", RECIPE, *settings(SETTINGS)), tmp_path, code=3)
    assert "kernels.compile: there is no C++ compiler ('/no/such/compiler'" in ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()
