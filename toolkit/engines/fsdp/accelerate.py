"""Engine `fsdp` in Accelerate: its plugin for FSDP2."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.backend import InAccelerate
from toolkit.errors import PlanError
from toolkit.layout import Layout
from toolkit.recipe.dump import dump

if TYPE_CHECKING:
    from torch import nn


class FsdpInAccelerate(InAccelerate):
    """FSDP2 as engine fsdp does it. Prefetching is left to torch."""

    fields = ("fsdp", "fsdp_config")
    common = {"fsdp2": Layout(zero_stage=3)}
    notes = (
        "With mixed_precision, Accelerator() also reduces gradients in 16 bits; "
        "launch/train.py",
        "and toolkit.accelerate.accelerator(RECIPE) do so in fp32.",
    )
    recomputes = True
    exchanges = {"all_gather": "allgather"}

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
        if layout.replicate == layout.cp == 1:
            return {}
        shards = layout.dp // layout.replicate
        sizes = {"dp_replicate_size": layout.replicate, "dp_shard_size": shards}
        strategy = {"cp_comm_strategy": self.exchanges[layout.exchange]}
        return {**sizes, **({"cp_size": layout.cp, **strategy} if layout.cp > 1 else {})}

    def prepare_process(self) -> None:
        from toolkit.engines.fsdp.accelerate_patch import complete_fsdp

        complete_fsdp()

    def accelerator(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        import torch
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **_settings(layout)
        )
        return {"fsdp_plugin": plugin, "cpu": not torch.cuda.is_available()}

    def prepare_model(self, accelerator: Any, model: "nn.Module") -> None:
        """The classes of the layers that are gathered one at a time.

        The model's own word (`_no_split_modules`), or that of the transformers model in it.
        """
        from transformers import PreTrainedModel

        inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        present = {type(module).__name__ for module in model.modules()}
        for owner in (model, inner):
            if names := present & set(getattr(owner, "_no_split_modules", None) or ()):
                accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = sorted(names)
                return
        raise PlanError(
            f"{type(model).__name__} does not say which of its layers FSDP shards one by one",
            fix="name their classes in its attribute _no_split_modules, e.g. ['Block']",
        )

    def training_arguments(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """Saved whole: save_model then writes what transformers loads."""
        saved = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
        return {"fsdp": True, "fsdp_config": _settings(layout) | saved}

    def made(self, model: "nn.Module", layout: Layout) -> tuple[str, bool]:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        meshes = {
            one.device_mesh.shape for one in model.parameters() if isinstance(one, DTensor)
        }
        copies = layout.replicate
        shape = (copies,) * (copies > 1) + (layout.dp * layout.cp // copies,)
        planned = isinstance(model, FSDPModule) and units > 1 and meshes == {shape}
        return f"{units} units of FSDP2 over {[*meshes]} ranks", planned


def _settings(layout: Layout) -> dict[str, Any]:
    """In the words of Accelerate's plugin and TrainingArguments alike."""
    return {
        "reshard_after_forward": layout.zero_stage == 3,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_offload": layout.offload_parameters == "cpu",
        "activation_checkpointing": layout.recompute == "full",
        "cpu_ram_efficient_loading": False,
    }


_IN_FILES = {"cpu_offload": "offload_params"}
"""Where the name in Accelerate's files is another than `fsdp_` and that of `_settings`."""
