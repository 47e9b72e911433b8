"""`fp8` through whole runs of the tiny recipe, in bf16."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.product import curve, dmt, events, run, settings
from tests.processes import ROOT

pytestmark = pytest.mark.slow

RECIPE = ROOT / "recipes/tiny/llama-bytes.yaml"
SETTINGS = {
    "training.precision": "bf16",
    "data.train": '{kind: text, files: ["{stdlib}/a*.py"]}',
    "logging": "{every_steps: 1}",
}
FP8 = {"fp8": "{recipe: rowwise}"}


def trained(folder: Path, name: str, **changes: object) -> Path:
    wanted = dmt("launch", RECIPE, "--run-dir", name, *settings(SETTINGS | changes))
    ended = run(wanted, folder)
    assert ended.code == 0, ended.err
    return folder / name


def test_200_steps(tmp_path: Path) -> None:
    """Not 2% above bf16's validation loss, and exported in bf16.

    In six runs of three seeds, fp8 was between 0.3% above and 1.7% below: rounding sends a
    run elsewhere, which says nothing of fp8 where it is for the better.
    """
    runs = [trained(tmp_path, "bf16"), trained(tmp_path, "fp8", **FP8)]
    plain, eight = (events(one, "evaluation")[-1] for one in runs)
    assert plain["step"] == eight["step"] == 200
    assert curve(runs[0]) != curve(runs[1])
    assert 0.95 < eight["loss"] / plain["loss"] <= 1.02
    exported = AutoModelForCausalLM.from_pretrained(runs[1] / "export")
    assert exported.dtype == torch.bfloat16


def test_resume(tmp_path: Path) -> None:
    """Bitwise the run without a break."""
    short = FP8 | {
        "schedule": "{name: constant, warmup_steps: 0}",
        "evaluation.every_steps": "null",
    }
    for steps in (3, 6):
        broken = trained(tmp_path, "broken", **short, **{"training.steps": steps})
    whole = trained(tmp_path, "whole", **short, **{"training.steps": 6})
    assert curve(broken) == curve(whole)
