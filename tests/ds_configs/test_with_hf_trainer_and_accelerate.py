"""Every shipped preset trains as it is under Hugging Face Trainer and under Accelerate.

Two processes over gloo; all presets of one library in one start.
"""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ds_configs import train_worker
from tests.forked import run_ranks
from toolkit.engines.deepspeed.config import PRESETS, preset_path

RUNNABLE = [name for name in PRESETS if name not in ("zeropp", "zero3_nvme")]
"""ZeRO++ quantizes with kernels that DeepSpeed has for CUDA only; NVMe has its own test."""
TOLERANCE = {"trainer": 1e-5, "accelerate": 5e-3}
"""Relative to the loss of zero1: Trainer runs in fp32, Accelerate in bf16."""
BOTH = [*({"zeropp"} & {*PRESETS}), pytest.param("zero3_nvme", marks=pytest.mark.soak)]
NVME_TOLERANCE = 5e-3
"""Without CUDA, DeepSpeed keeps parameters on NVMe in bf16, also in an fp32 run, when the
model is not built under `deepspeed.zero.Init`."""
LIBRARIES = ["trainer", pytest.param("accelerate", marks=pytest.mark.soak)]

Losses = dict[str, list[float]]


def losses_of(library: str, names: list[str], **environment: str) -> Losses:
    """Preset → loss of each step."""
    files = [preset_path(name) for name in names]
    return run_ranks(train_worker.losses, 2, library, files, env=environment)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
@pytest.mark.parametrize("library", LIBRARIES)
def test_presets_train_and_give_the_same_loss(library: str) -> None:
    """Regression for DeepSpeed#5188, ZeRO stages disagree."""
    losses = losses_of(library, RUNNABLE)
    for name, steps in losses.items():
        print(name)
        assert all(map(math.isfinite, steps))
        assert steps[0] > steps[1] > steps[2]
        if (library, name) == ("accelerate", "zero0"):
            continue  # in bf16, DeepSpeed's stage 0 begins with one AdamW step too many
        assert steps == pytest.approx(losses["zero1"], rel=TOLERANCE[library])


@pytest.mark.soak
@pytest.mark.needs("libaio-dev")
@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("library", ["trainer", "accelerate"])
def test_nvme_trains_and_gives_the_same_loss(library: str, tmp_path: Path) -> None:
    environment = {
        f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind}_NVME_PATH": str(tmp_path)
        for kind in ("OPTIMIZER", "PARAM")
    }
    losses = losses_of(library, ["zero1", "zero3_nvme"], **environment)
    assert list(tmp_path.rglob("*.swp")), "nothing was moved to nvme_path"
    assert losses["zero3_nvme"] == pytest.approx(losses["zero1"], rel=NVME_TOLERANCE)


READ = """
import sys
from accelerate import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

file, folder = sys.argv[1:]
arguments = TrainingArguments(output_dir=folder, bf16=True, use_cpu=True, report_to=[])
hf = HfTrainerDeepSpeedConfig(file)
hf.trainer_config_process(arguments)
accelerate = DeepSpeedPlugin(hf_ds_config=file, gradient_accumulation_steps=1)
accelerate.set_mixed_precision("bf16")
accelerate.deepspeed_config_process(
    must_match=False, gradient_clipping=1.0, train_batch_size=4,
    train_micro_batch_size_per_gpu=4,
)
accelerate.deepspeed_config["steps_per_print"] = 1
for config in (hf.config, accelerate.deepspeed_config):
    assert "auto" not in str(config).replace("nvme_path': 'auto", ""), config
    read = DeepSpeedConfig(config)
    assert read.bfloat16_config.enabled and not read.float16_config.enabled
    assert read.gradient_clipping == 1.0
    print(read.zero_config.stage, read.zero_config.zero_quantized_weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_is_filled_completely_by_both(name: str, tmp_path: Path) -> None:
    """What cannot run everywhere is at least understood by both libraries."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, str(preset_path(name)), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["3", str(name == "zeropp")] * 2


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
