"""What an engine is built from, and the one line per engine that names its class."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.engines.base import Engine
from toolkit.engines.deepspeed import ops as deepspeed_ops
from toolkit.engines.deepspeed.config import (
    DeepSpeedRequest,
    offload_of,
    open_config,
    render,
    stage_of,
)
from toolkit.engines.megatron import config as megatron_config
from toolkit.engines.torch import fsdp_config
from toolkit.layout import Layout
from toolkit.models.families import MegatronModel
from toolkit.plan.planner import Plan
from toolkit.plan.rules.legality import ModelName
from toolkit.recipe.schema import OptimizerSection, Recipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from toolkit.engines.distributed import Ranks
    from toolkit.models.weights import WeightSource

ENGINES = {
    "ddp": "toolkit.engines.torch.ddp:DdpEngine",
    "deepspeed": "toolkit.engines.deepspeed.engine:DeepSpeedEngine",
    "fsdp": "toolkit.engines.torch.fsdp:FsdpEngine",
    "megatron": "toolkit.engines.megatron.engine:MegatronEngine",
}


@dataclass(frozen=True)
class EngineSetup:
    """Everything an engine needs, and nothing else of the recipe."""

    model_config: "PretrainedConfig"
    weights: "WeightSource"
    model: ModelName
    layout: Layout
    precision: str
    seed: int
    optimizer: OptimizerSection
    ranks: "Ranks"
    engine_config: dict[str, Any]
    """The rendered backend configuration (`deepspeed.json`, …); empty for ddp."""
    megatron: MegatronModel | None
    """The model in megatron-core's words; None for `hf`."""

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        plan: Plan,
        engine_config: dict[str, Any],
        ranks: "Ranks",
        model_config: "PretrainedConfig",
        weights: "WeightSource",
    ) -> "EngineSetup":
        """What the engine of `plan` reads of a recipe.

        Raises PlanError when the loaded `model_config` is not what was planned.
        """
        megatron = None
        if plan.model == "megatron":
            megatron = megatron_config.loaded_model(recipe.model, model_config.to_dict())
        return cls(
            model_config=model_config,
            weights=weights,
            model=plan.model,
            layout=plan.layout,
            precision=recipe.training.precision,
            seed=recipe.training.seed,
            optimizer=recipe.optimizer,
            ranks=ranks,
            engine_config=engine_config,
            megatron=megatron,
        )


def render_engine_config(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The backend's configuration for the run directory; empty for ddp.

    Raises RecipeError when the recipe's own DeepSpeed file disagrees with the recipe.
    """
    if plan.engine == "megatron":
        return megatron_config.render(recipe, plan.layout)
    precision = recipe.training.precision
    if plan.engine == "fsdp":
        return fsdp_config.render(plan.layout, precision)
    if plan.engine != "deepspeed":
        return {}
    assert precision != "fp8", "refused at check"
    request = DeepSpeedRequest(
        plan.layout,
        precision,
        recipe.optimizer,
        recipe.parallel.zero.nvme_path,
        recipe.parallel.zero.config,
    )
    return render(request)


def adopt_engine_config(recipe: Recipe) -> Recipe:
    """The recipe with stage and offload of its own DeepSpeed file where it leaves them open.

    `parallel.zero.config` names that file. What the recipe states itself stays, and must
    agree with the file (`render` checks that).
    """
    zero = recipe.parallel.zero
    if zero.config is None:
        return recipe
    file = open_config(zero.config)
    optimizer, parameters = offload_of(file)
    update: dict[str, object] = {}
    if zero.stage == "auto" and (stage := stage_of(file)) is not None:
        update["stage"] = stage
    if zero.offload_optimizer == "auto" and optimizer is not None:
        update["offload_optimizer"] = optimizer
    if zero.offload_parameters == "auto" and parameters is not None:
        update["offload_parameters"] = parameters
    parallel = recipe.parallel.model_copy(update={"zero": zero.model_copy(update=update)})
    return recipe.model_copy(update={"parallel": parallel})


def environment(plan: Plan, gpu: str) -> dict[str, str]:
    """Variables that must be set before a worker first touches its GPU.

    One queue to the GPU keeps tensor-parallel communication ahead of the products that
    hide it (megatron-core's own advice up to Hopper); it would slow ZeRO-3's gathers.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if gpu == "cpu" or plan.layout.tp == 1 or name in os.environ:
        return {}
    return {name: "1"}


def prepare_ops(engine: str, config: dict[str, Any], report: Callable[[str], None]) -> None:
    """Check for and build the compiled operators that a configuration needs.

    Raises BackendUnavailable naming what is missing and how to get it.
    """
    if engine == "deepspeed":
        deepspeed_ops.put_ninja_on_path()
        ops = deepspeed_ops.required_ops(config)
        deepspeed_ops.preflight(ops)
        deepspeed_ops.build(ops, report)


def build_engine(name: str, setup: EngineSetup) -> Engine:
    """Build the engine `name` on this rank; collective."""
    if setup.model == "megatron":
        from toolkit.models.megatron import cpu

        cpu.before_import()
    module, _, attribute = ENGINES[name].partition(":")
    engine: Engine = getattr(import_module(module), attribute)(setup)
    return engine
