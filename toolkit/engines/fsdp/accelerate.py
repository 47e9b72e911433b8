"""Engine `fsdp` in Accelerate: its plugin for FSDP2."""

from collections.abc import Mapping
from typing import Any

from toolkit.backend import InAccelerate
from toolkit.errors import PlanError
from toolkit.layout import Layout
from toolkit.recipe.dump import dump


class FsdpInAccelerate(InAccelerate):
    """FSDP2 as engine fsdp does it. Prefetching is left to torch."""

    fields = ("fsdp", "fsdp_config")
    notes = (
        "With mixed_precision, Accelerate reduces gradients in 16 bits; launch/train.py",
        "and toolkit.accelerate.prepare(RECIPE) do so in fp32.",
    )
    recomputes = True

    def reduces_every_batch(self, layout: Layout) -> bool:
        """If not, whole gradients are kept until the last micro batch."""
        return layout.zero_stage > 1

    def distributed_type(self, world: int) -> str:
        return "FSDP"

    def section(self, layout: Layout, precision: str, config: Mapping[str, Any]) -> str:
        words = {_IN_FILES.get(name, name): value for name, value in _settings(layout).items()}
        settings = {
            "fsdp_version": 2,
            **{f"fsdp_{name}": value for name, value in words.items()},
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
        sections: dict[str, object] = {"mixed_precision": precision, "fsdp_config": settings}
        if sizes := self.mesh(layout):
            name = "parallelism_config"
            sections[name] = {f"{name}_{key}": value for key, value in sizes.items()}
        return dump(sections, flow=False)

    def mesh(self, layout: Layout) -> dict[str, object]:
        """Without one, Accelerate shards over all ranks."""
        copies = layout.replicate
        if copies == 1:
            return {}
        return {"dp_replicate_size": copies, "dp_shard_size": layout.dp // copies}

    def accelerator(
        self, layout: Layout, precision: str, config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Gradients are reduced in fp32."""
        import torch
        from accelerate import FullyShardedDataParallelPlugin
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **_settings(layout)
        )
        if dtype := {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision):
            plugin.mixed_precision_policy = MixedPrecisionPolicy(dtype, torch.float32)
        on_gpus = torch.cuda.is_available()
        if isinstance(plugin.cpu_offload, CPUOffloadPolicy) and not on_gpus:
            plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
        return {"fsdp_plugin": plugin, "cpu": not on_gpus}

    def complete(self, accelerator: Any, settings: Mapping[str, Any]) -> None:
        """On CPUs, Accelerate leaves the plugin out."""
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

        if settings["cpu"]:
            accelerator.state.fsdp_plugin = settings["fsdp_plugin"]
            for state in (accelerator.state, PartialState()):
                state.distributed_type = DistributedType.FSDP

    def training_arguments(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """Saved whole: save_model then writes what transformers loads."""
        import torch

        if not torch.cuda.is_available():
            raise PlanError(
                "the plan runs on the engine fsdp, and a Trainer on CPUs would not shard",
                fix="--set parallel.engine=deepspeed, or a loop of your own with `prepare`",
            )
        saved = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
        return {"fsdp": True, "fsdp_config": _settings(layout) | saved}


def _settings(layout: Layout) -> dict[str, Any]:
    """Settings that Accelerate's plugin and TrainingArguments name alike."""
    return {
        "reshard_after_forward": layout.zero_stage == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_offload": layout.offload_parameters == "cpu",
        "activation_checkpointing": layout.recompute == "full",
        "cpu_ram_efficient_loading": False,
    }


_IN_FILES = {"cpu_offload": "offload_params"}
"""Names in Accelerate's files that are not `fsdp_` and the name in `_settings`."""
