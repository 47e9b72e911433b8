"""What Accelerate's launcher left in the environment cannot change a run."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import curve, run, settings, tool
from tests.processes import ROOT

pytestmark = pytest.mark.slow


def test_a_stray_accelerate_file_switches_nothing_on(
    project: Project, ddp_run: Path, tmp_path: Path
) -> None:
    """axolotl#394: a forgotten default_config.yaml switched FSDP on."""
    file = tmp_path / "default_config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: fp16\n"
        "num_processes: 2\nnum_machines: 1\nmachine_rank: 0\nmain_process_port: 0\n"
        "fsdp_config: {fsdp_version: 2}\n"
    )
    start = tool("accelerate", "launch", "--config_file", file, ROOT / "launch/train.py")
    changes = settings({"training.steps": 2, "checkpoint.export": "false"})
    argv = [*start, str(project.recipe), "--run-dir", "stray", *changes]
    ended = run(argv, project.folder, code=0)
    (line,) = [line for line in ended.err.splitlines() if line.startswith("dmt: ")]
    assert "ACCELERATE_USE_FSDP=true (parallel.engine is ddp)" in line
    assert "ACCELERATE_MIXED_PRECISION=fp16 (training.precision is fp32)" in line
    assert "the recipe takes precedence" in line
    expected = curve(ddp_run)
    assert curve(project.folder / "stray") == {
        step: pytest.approx(expected[step], rel=1e-5) for step in (1, 2)
    }
