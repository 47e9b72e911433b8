"""The jobs in `launch/` are what the launchers write today.

`DMT_UPDATE_GOLDEN=1 pytest tests/launchers/test_templates.py` writes them.
"""

import os
import sys

import pytest

from tests.processes import ROOT
from toolkit.intake.load import load_recipe
from toolkit.launchers import job
from toolkit.launchers.base import starter
from toolkit.run.assignment import decide

RECIPE = "recipes/llama/llama-3.1-8b-pretrain.yaml"
STATED = {
    "slurm": ("launch.slurm.options=[--time=24:00:00]",),
    "kubernetes": (
        "launch.kubernetes.image=registry.example.com/dmt:latest",
        "launch.kubernetes.volume_claim=training",
    ),
}
"""What the job of an 8B model needs besides its recipe."""


@pytest.mark.parametrize("launcher", STATED)
def test_the_file_is_current(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths are relative to a checkout."""
    for variable in ("TORCHFT_LIGHTHOUSE", "WANDB_ENTITY", "WANDB_MODE", "WANDB_TAGS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(job, "_allocator", lambda: f"{job.EXPANDABLE},{job.EXACT_PINNED}")
    recipe = load_recipe(ROOT / RECIPE, STATED[launcher])
    made = job.job_of(decide(recipe, ROOT / "runs" / "llama-3.1-8b"))
    *_, (path, text) = starter(launcher).spec(made).files.items()
    here = {sys.executable: "python3", str(made.recipe_file): RECIPE, f"{ROOT}/": ""}
    for old, new in here.items():
        text = text.replace(old, new)
    note = f"# An example; for your own recipe: dmt render RECIPE --to {launcher}\n"
    shebang = "#!/bin/bash\n" * text.startswith("#!")
    text = shebang + note + text.removeprefix(shebang)
    file = ROOT / "launch" / launcher / f"llama-3.1-8b{path.suffix}"
    if "DMT_UPDATE_GOLDEN" in os.environ:
        file.write_text(text)
    assert file.read_text() == text
    assert str(ROOT) not in text
