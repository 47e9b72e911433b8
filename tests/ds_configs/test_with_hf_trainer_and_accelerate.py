"""Every shipped preset trains as it is under Hugging Face Trainer, and Accelerate reads it.

Two processes over gloo; all presets in one start.
"""

import math
import re
from pathlib import Path

import pytest

from tests.ds_configs import train_worker
from tests.forked import run_ranks
from toolkit.engines.deepspeed.config import PRESETS, preset_path

RUNNABLE = [name for name in PRESETS if name not in ("zeropp", "zero3_nvme")]
"""ZeRO++ quantizes with kernels that DeepSpeed has for CUDA only; NVMe has its own test."""
NVME_TOLERANCE = 5e-3
"""Without CUDA, DeepSpeed keeps parameters on NVMe in bf16, also in an fp32 run, when the
model is not built under `deepspeed.zero.Init`."""


def losses_of(names: list[str], **environment: str) -> dict[str, list[float]]:
    """Preset → loss of each step."""
    files = [preset_path(name) for name in names]
    return run_ranks(train_worker.losses, 2, files, env=environment)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_presets_train_and_give_the_same_loss() -> None:
    """Regression for DeepSpeed#5188, ZeRO stages disagree."""
    losses = losses_of(RUNNABLE)
    for name, steps in losses.items():
        print(name)
        assert all(map(math.isfinite, steps))
        assert steps[0] > steps[1] > steps[2]
        assert steps == pytest.approx(losses["zero1"], rel=1e-5)


@pytest.mark.soak
@pytest.mark.needs("libaio-dev")
@pytest.mark.usefixtures("async_io")
def test_nvme_trains_and_gives_the_same_loss(tmp_path: Path) -> None:
    environment = {
        f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_NVME_PATH": str(tmp_path)
        for kind in ("OPTIMIZER", "PARAM")
    }
    losses = losses_of(["zero1", "zero3_nvme"], **environment)
    assert list(tmp_path.rglob("*.swp")), "nothing was moved to nvme_path"
    assert losses["zero3_nvme"] == pytest.approx(losses["zero1"], rel=NVME_TOLERANCE)


@pytest.mark.slow
def test_are_filled_completely_by_both(tmp_path: Path) -> None:
    """By the Trainer and by Accelerate, for a script with an optimizer of its own."""
    files = [preset_path(name) for name in PRESETS]
    found = run_ranks(train_worker.filled_by_both, 1, files, str(tmp_path))[0]
    for name in PRESETS:
        stage = 3 if name == "zeropp" else int(name[4])
        assert found[name] == [(stage, name == "zeropp")] * 2, name


@pytest.mark.slow
def test_the_readmes_lines_switch_the_shared_memory_build_off(tmp_path: Path) -> None:
    """Without them this takes minutes, or ends where there is no compiler."""
    readme = (preset_path("zero2").parent / "README.md").read_text(encoding="utf-8")
    (lines,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "script.py").write_text(
        f"{lines}\ndeepspeed.init_distributed('gloo', verbose=False)\n"
        "assert deepspeed.comm.comm.cdb.shm_comm_op is None\n"
    )
    built = tmp_path / "extensions"
    env = {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(built)}
    run_ranks(train_worker.run_script, 1, tmp_path / "script.py", env=env)
    assert not list(built.rglob("*"))
