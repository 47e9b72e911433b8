"""The GPU benchmarks on a processor: every side trains for real; only a GPU gives figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import COMPILER
from tests.processes import ROOT
from toolkit.backend import BACKENDS


def benchmark(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "benchmarks/gpu.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.soak
@pytest.mark.needs(*COMPILER)
def test_every_engine_against_both_loops(tmp_path: Path) -> None:
    """The tiny shape in bf16: the Trainer, and FSDP2 with compiled layers and loss."""
    file = tmp_path / "result.json"
    ended = benchmark("--shape", "tiny", "--pairs", "1", "--steps", "10", "--out", str(file))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(file.read_text())
    assert (result["gpu"], result["shape"], result["precision"]) == ("cpu", "tiny", "bf16")
    sides = {*BACKENDS.names, "trainer", "torchtitan's settings"}
    assert set(result["milliseconds_per_step"]) == sides
    assert all(one > 0 for one in result["milliseconds_per_step"].values())
    for loop in ("trainer", "torchtitan's settings"):
        ratios = result[f"tokens_per_s_ratio_dmt_to_{loop}"]
        assert set(ratios) == set(BACKENDS.names)
        assert all(len(one["pairs"]) == 1 and one["median"] > 0 for one in ratios.values())
    assert "round 1: " in ended.stdout and " × trainer" in ended.stdout
