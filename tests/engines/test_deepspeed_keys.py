"""The written-down lists of DeepSpeed's keys against the installed DeepSpeed."""

import json
import os
from typing import Any, ClassVar

from tests.forked import run_ranks
from toolkit.engines.deepspeed.keys import FILE, KNOWN_KEYS


class Recorder(dict[str, Any]):
    """Remembers every key that DeepSpeed asks for."""

    asked: ClassVar[set[str]] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> "Recorder":
        return self


def installed() -> dict[str, list[str]]:
    """DeepSpeed's keys, by block."""
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    config.DeepSpeedConfig(Recorder(train_batch_size=1))
    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    types = {
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "zero_optimization": DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    }
    fields = {
        block: sorted(
            field.alias or name
            for name, field in model.model_fields.items()
            if not (field.json_schema_extra or {}).get("deprecated")
        )
        for block, model in types.items()
    }
    data_types = config.GRAD_ACCUM_DTYPE, config.PARAM_DTYPE, config.BUFFER_DTYPE
    return fields | {
        "removed": sorted({*removed, *config._REMOVED_ZERO_CONFIG_KEYS}),
        "": sorted(Recorder.asked - removed),
        "aio": sorted(AIO_DEFAULT_DICT),
        "data_types": sorted([*data_types, config.KEEP_IN_FP32_MODULES]),
    }


def test_known_keys_are_deepspeeds() -> None:
    (keys,) = run_ranks(installed, 1)
    if "DMT_UPDATE_GOLDEN" in os.environ:
        tables = json.loads(FILE.read_text()) | keys
        FILE.write_text(json.dumps(tables, indent=1) + "\n")
    blocks = [block for block in KNOWN_KEYS if not block.startswith("optimizer")]
    assert {block: sorted(KNOWN_KEYS[block]) for block in blocks} == {
        block: keys[block] for block in blocks
    }
