"""An Accelerator that follows a plan, and verifies that Accelerate did.

Accelerate decides by environment variables, the machine and its arguments together, and
silently ignores what does not fit: on CPUs it starts no process group for DeepSpeed and shards
nothing for FSDP. Here everything is stated explicitly, and verified afterwards.
"""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from transformers import PreTrainedModel

from toolkit.backend import BACKENDS, InAccelerate
from toolkit.engines.distributed import join
from toolkit.errors import BackendUnavailable, PlanError, RunFailed
from toolkit.foreign.accelerate_file import MIXED_PRECISION, in_accelerate
from toolkit.foreign.environment import accelerate_settings, mesh_variables
from toolkit.layout import Layout
from toolkit.models import huggingface as hf
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe
from toolkit.text.terminal import tell


class PlannedAccelerator(Accelerator):  # type: ignore[misc] # accelerate has no types
    """`accelerate.Accelerator` for one plan."""

    def __init__(self, recipe: Recipe, plan: Plan, **more: Any) -> None:
        self.recipe, self.plan = recipe, plan
        self._words = in_accelerate(recipe, plan)
        prepare_process(self._words, plan.layout)
        config = BACKENDS[plan.engine].render(recipe, plan.layout)
        settings = self._words.accelerator(plan.layout, config)
        handlers = [*settings.pop("kwargs_handlers", ()), *more.pop("kwargs_handlers", ())]
        super().__init__(
            mixed_precision=MIXED_PRECISION[recipe.training.precision],
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=plan.layout.gradient_accumulation,
                # The recipe counts steps across epochs.
                sync_with_dataloader=False,
                sync_each_batch=self._words.reduces_every_batch(plan.layout),
            ),
            kwargs_handlers=handlers,
            **settings,
            **more,
        )
        with self.local_main_process_first():
            BACKENDS[plan.engine].prepare(config, tell)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """`Accelerator.prepare`, with the plan's recompute, checked.

        Raises PlanError for a model that does not support the plan, RunFailed if Accelerate did
        not follow it.
        """
        for model in _modules(args):
            self._get_ready(model)
        prepared = super().prepare(*args, device_placement=device_placement)
        for model in _modules(prepared if isinstance(prepared, tuple | list) else [prepared]):
            self._check(model)
        return prepared

    def _get_ready(self, model: nn.Module) -> None:
        """Recompute and the layers to shard by, which Accelerate leaves to the model."""
        self._words.prepare_model(self, model)
        if self.plan.layout.recompute == "full" and not self._words.recomputes:
            inner = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
            if inner is None:
                raise PlanError(
                    f"the plan recomputes activations; {type(model).__name__} holds no "
                    "transformers model that could",
                    fix="--set parallel.recompute=none",
                )
            hf.enable_recompute(inner, self.plan.layout.recompute)

    def _check(self, model: nn.Module) -> None:
        """Raises RunFailed unless `model` is wrapped as planned."""
        layout = self.plan.layout
        found, wanted = self._words.made(model, layout)
        if not wanted:
            raise RunFailed(
                f"planned: engine {self.plan.engine}, zero {layout.zero_stage}, "
                f"{layout.world} ranks; Accelerate made {found} of the model",
                fix="report this, with the versions of accelerate and torch",
                retry=False,
            )


def prepare_process(words: InAccelerate, layout: Layout) -> None:
    """Prepare this process so that Accelerate can run a plan.

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
    mesh = mesh_variables(words.mesh(layout))
    if mesh and not hasattr(ParallelismConfig, "sp_size"):
        raise BackendUnavailable(
            "the plan needs a ParallelismConfig, which Trainer reads since accelerate 1.12",
            fix='pip install "accelerate>=1.12"',
        )
    # Not as an argument: a Trainer's are lost when they are created anew from `to_dict()`.
    os.environ.update(mesh)
    words.prepare_process()


def _modules(objects: Any) -> list[nn.Module]:
    return [one for one in objects if isinstance(one, nn.Module)]
