"""An Accelerator that carries out a plan, and looks whether Accelerate really did.

Accelerate decides by environment variables, the machine and its arguments together, and what
does not fit it leaves out silently: on CPUs it starts no process group for DeepSpeed
and shards nothing for FSDP. Here everything is stated explicitly, and checked afterwards.
"""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin, InitProcessGroupKwargs
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from toolkit.accelerate.config import MIXED_PRECISION, script_config
from toolkit.accelerate.patches import complete_deepspeed, complete_fsdp
from toolkit.conflicts.environment import accelerate_settings
from toolkit.engines.deepspeed.models import import_deepspeed
from toolkit.engines.distributed import join
from toolkit.errors import PlanError, RunFailed
from toolkit.models import huggingface as hf
from toolkit.plan.planner import Plan
from toolkit.recipe.schema import Recipe
from toolkit.terminal import tell


class PlannedAccelerator(Accelerator):  # type: ignore[misc] # accelerate has no types
    """`accelerate.Accelerator` for one plan."""

    def __init__(self, recipe: Recipe, plan: Plan, **more: Any) -> None:
        self.recipe, self.plan = recipe, plan
        prepare_process(plan)
        settings = _SETTINGS[plan.engine](recipe, plan)
        handlers = [*settings.pop("kwargs_handlers", ()), *more.pop("kwargs_handlers", ())]
        super().__init__(
            mixed_precision=MIXED_PRECISION[recipe.training.precision],
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=plan.layout.gradient_accumulation,
                # The recipe counts steps over the seams between epochs.
                sync_with_dataloader=False,
                # FSDP otherwise keeps whole gradients until the last micro batch.
                sync_each_batch=plan.engine == "fsdp",
            ),
            kwargs_handlers=handlers,
            **settings,
            **more,
        )
        if plan.engine == "deepspeed":
            with self.local_main_process_first():
                plan.backend.prepare(plan.backend.render(recipe, plan.layout), tell)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """`Accelerator.prepare`, with the plan's recompute, checked.

        Raises PlanError for a model that cannot do what the plan says, RunFailed when
        Accelerate has not done it.
        """
        for model in _modules(args):
            self._get_ready(model)
        prepared = super().prepare(*args, device_placement=device_placement)
        for model in _modules(prepared if isinstance(prepared, tuple | list) else [prepared]):
            _check(model, self.plan)
        return prepared

    def _get_ready(self, model: nn.Module) -> None:
        """Recompute and the layers to shard by, which Accelerate leaves to the model."""
        inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
        if self.plan.engine == "fsdp":
            self.state.fsdp_plugin.transformer_cls_names_to_wrap = _layer_names(model, inner)
        elif self.plan.layout.recompute == "full":
            if inner is None:
                raise PlanError(
                    f"the plan recomputes activations; {type(model).__name__} holds no "
                    "transformers model that could",
                    fix="--set parallel.recompute=none",
                )
            hf.enable_recompute(inner)


def prepare_process(plan: Plan) -> None:
    """Make this process one in which Accelerate can carry out `plan`.

    The process group is joined as DMT's worker does, so that Accelerate finds one of the right
    backend. Variables that state what the recipe states are removed: Accelerate, DeepSpeed's
    plugin and the Trainer take from them whatever a script leaves open, and Accelerate forgets
    DeepSpeed where ACCELERATE_USE_CPU is set.
    """
    # What DeepSpeed calls by its old name, at every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if not dist.is_initialized():
        join()
    if not torch.cuda.is_available():
        # Unset, Accelerate would count physical cores, of which containers know none.
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    for name in accelerate_settings(os.environ):
        del os.environ[name]
    if plan.engine == "deepspeed":
        # Adopts the group: a model that ZeRO-3 shards while it is loaded is made before the
        # engine, and would take the run for one of a single process.
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        import_deepspeed().init_distributed(backend, auto_mpi_discovery=False, verbose=False)
        complete_deepspeed()
    elif plan.engine == "fsdp":
        complete_fsdp()


def fsdp_settings(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """What engine fsdp does, in the words of Accelerate's plugin and TrainingArguments alike.

    Prefetching is left to torch.
    """
    config = plan.backend.render(recipe, plan.layout)
    return {
        "reshard_after_forward": config["reshard_after_forward"],
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "cpu_offload": config["offload_policy"] is not None,
        "activation_checkpointing": plan.layout.recompute == "full",
        "cpu_ram_efficient_loading": False,
    }


def _ddp(_recipe: Recipe, _plan: Plan) -> dict[str, Any]:
    return {"cpu": not torch.cuda.is_available()}


def _deepspeed(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Accelerate forgets DeepSpeed when it is given a CPU; the backend alone may say so."""
    plugin = DeepSpeedPlugin(
        hf_ds_config=script_config(plan.backend.render(recipe, plan.layout)),
        zero3_init_flag=plan.layout.zero_stage == 3,
    )
    gloo = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    return {"deepspeed_plugin": plugin, "kwargs_handlers": gloo}


def _fsdp(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **fsdp_settings(recipe, plan)
    )
    return {"fsdp_plugin": plugin, "cpu": not torch.cuda.is_available()}


_SETTINGS = {"ddp": _ddp, "deepspeed": _deepspeed, "fsdp": _fsdp}


def _modules(objects: Any) -> list[nn.Module]:
    return [one for one in objects if isinstance(one, nn.Module)]


def _layer_names(model: nn.Module, inner: nn.Module | None) -> list[str]:
    """Classes of the layers that FSDP gathers one at a time.

    The model's own word (`_no_split_modules`), or that of the transformers model in it.
    """
    present = {type(module).__name__ for module in model.modules()}
    for owner in (model, inner):
        if names := present & set(getattr(owner, "_no_split_modules", None) or ()):
            return sorted(names)
    raise PlanError(
        f"{type(model).__name__} does not say which of its layers FSDP shards one by one",
        fix="name their classes in its attribute _no_split_modules, e.g. ['Block']",
    )


def _check(model: nn.Module, plan: Plan) -> None:
    """Raises RunFailed unless `model` is wrapped as planned."""
    if plan.engine == "deepspeed":
        stage = getattr(model, "zero_optimization_stage", lambda: None)()
        found, wanted = f"DeepSpeed's ZeRO stage {stage}", stage == plan.layout.zero_stage
    elif plan.engine == "fsdp":
        units = sum(isinstance(module, FSDPModule) for module in model.modules())
        found, wanted = f"{units} units of FSDP2", isinstance(model, FSDPModule) and units > 1
    else:
        found = type(model).__name__
        trains = any(parameter.requires_grad for parameter in model.parameters())
        alone = plan.layout.world == 1 or not trains
        wanted = alone or isinstance(model, DistributedDataParallel)
    if not wanted:
        raise RunFailed(
            f"planned: engine {plan.engine}, zero {plan.layout.zero_stage}, "
            f"{plan.layout.world} ranks; Accelerate made {found} of the model",
            fix="report this, with the versions of accelerate and torch",
            retry=False,
        )
