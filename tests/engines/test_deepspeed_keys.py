"""The written-down lists of DeepSpeed's keys against the installed DeepSpeed."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from toolkit.engines.deepspeed.keys import (
    FILE,
    KNOWN_KEYS,
)

COLLECT = """
import json
from deepspeed.runtime import config
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)


class Recorder(dict):
    '''Remembers every key that DeepSpeed asks for.'''

    asked = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return self

    def __copy__(self):
        return self


config.DeepSpeedConfig(Recorder(train_batch_size=1))
removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)


def fields(model):
    old = {
        name
        for name, field in model.model_fields.items()
        if (field.json_schema_extra or {}).get("deprecated")
    }
    return sorted(field.alias or name for name, field in model.model_fields.items()
                  if name not in old)


print(json.dumps({
    "removed": sorted({*removed, *config._REMOVED_ZERO_CONFIG_KEYS}),
    "": sorted(Recorder.asked - removed),
    "aio": sorted(AIO_DEFAULT_DICT),
    "bf16": fields(DeepSpeedBF16Config),
    "data_types": sorted([config.GRAD_ACCUM_DTYPE, config.PARAM_DTYPE, config.BUFFER_DTYPE,
                          config.KEEP_IN_FP32_MODULES]),
    "fp16": fields(DeepSpeedFP16Config),
    "zero_optimization": fields(DeepSpeedZeroConfig),
    "zero_optimization.offload_optimizer": fields(DeepSpeedZeroOffloadOptimizerConfig),
    "zero_optimization.offload_param": fields(DeepSpeedZeroOffloadParamConfig),
}))
"""


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", COLLECT],
        capture_output=True,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    keys: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    if "DMT_UPDATE_GOLDEN" in os.environ:
        tables = json.loads(FILE.read_text()) | keys
        FILE.write_text(json.dumps(tables, indent=1) + "\n")
    return keys


@pytest.mark.parametrize("block", [b for b in KNOWN_KEYS if not b.startswith("optimizer")])
def test_known_keys_are_deepspeeds(block: str, installed: dict[str, Any]) -> None:
    assert sorted(KNOWN_KEYS[block]) == installed[block]
