"""Engine `deepspeed` in Accelerate: the complete JSON, in its plugin and in its file.

Accelerate's own DeepSpeed keys (`zero_stage`, `gradient_clipping`, …) are not used: they cannot
express all settings, and DeepSpeed fills the missing ones with defaults that change the loss
(clipping at 1.0, gradients of micro batches summed in bf16).
"""

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from toolkit.backend import InAccelerate
from toolkit.layout import Layout
from toolkit.recipe.dump import dump

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_CLIPS_AT = 1.0
"""The value that Accelerate, and by default a Trainer, puts in place of "auto"."""


class DeepSpeedInAccelerate(InAccelerate):
    """ZeRO as the JSON of engine deepspeed states it."""

    fields = ("deepspeed",)

    def distributed_type(self, world: int) -> str:
        return "DEEPSPEED"

    def section(self, layout: Layout, precision: str, config: Mapping[str, Any]) -> str:
        """The section of Accelerate's file, with DeepSpeed's JSON as text, not as a file name.

        It has no `mixed_precision`, which the JSON states. Accelerate refuses both together.
        """
        settings = {
            "zero3_init_flag": layout.zero_stage == 3,
            # Accelerate on each machine, not pdsh from the first one.
            "deepspeed_multinode_launcher": "standard",
        }
        head = dump({"deepspeed_config": settings}, flow=False)
        text = textwrap.indent(json.dumps(_open_batch(script_config(config)), indent=2), "    ")
        return f"{head}  deepspeed_config_file: |-\n{text}\n"

    def prepare_process(self) -> None:
        """DeepSpeed adopts the process group: a model that ZeRO-3 shards while it is loaded is
        created before the engine, and would otherwise assume a single process."""
        import torch

        from toolkit.engines.deepspeed.models import import_deepspeed

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        import_deepspeed().init_distributed(backend, auto_mpi_discovery=False, verbose=False)
        _complete_optimizers()

    def accelerator(
        self, layout: Layout, precision: str, config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of an Accelerator that uses DeepSpeed. Only the process group's backend
        may say that this is a CPU: Accelerate drops DeepSpeed for a CPU device."""
        import torch
        from accelerate import DeepSpeedPlugin
        from accelerate.utils import InitProcessGroupKwargs

        plugin = DeepSpeedPlugin(
            hf_ds_config=script_config(config), zero3_init_flag=layout.zero_stage == 3
        )
        gloo = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
        return {"deepspeed_plugin": plugin, "kwargs_handlers": gloo}

    def training_arguments(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"deepspeed": _open_batch(script_config(config))}


def script_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's JSON for a script with its own optimizer, as Accelerate requires it.

    Accelerate refuses a torch optimizer next to an `optimizer` block.
    """
    return {key: value for key, value in config.items() if key != "optimizer"}


def _open_batch(config: dict[str, Any]) -> dict[str, Any]:
    """The JSON with "auto" for what scripts state themselves: a Trainer, TRL's included,
    refuses other numbers than its own.

    For clipping, a script without a Trainer gets 1.0 from Accelerate: any other value stays.
    """
    changed = dict.fromkeys(_BATCH, "auto")
    if config.get("gradient_clipping") == _CLIPS_AT:
        changed["gradient_clipping"] = "auto"
    return {**config, **changed}


def _complete_optimizers() -> None:
    """Give DeepSpeed's optimizers the `defaults` of the torch optimizer that they wrap.

    transformers' schedules with a smallest rate (`polynomial`, `cosine_with_min_lr`) read the
    peak there.
    """
    from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer

    if not hasattr(DeepSpeedOptimizer, "defaults"):
        DeepSpeedOptimizer.defaults = property(lambda self: self.optimizer.defaults)
