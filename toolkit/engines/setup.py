"""The inputs from which an engine is built."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from toolkit.batch import MicroBatch
from toolkit.engines.megatron import config as megatron_config
from toolkit.errors import RecipeError
from toolkit.layout import Layout
from toolkit.models.adapters.lora import Lora, lora_of
from toolkit.models.families import MegatronModel
from toolkit.models.frozen import matching
from toolkit.models.routers import balance_problems
from toolkit.objectives import Objective
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import OptimizerSection, Recipe

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from toolkit.checkpoint.shards import StateShard
    from toolkit.engines.distributed import Ranks
    from toolkit.models.context import Context
    from toolkit.models.weights import WeightSource


@dataclass(frozen=True)
class EngineSetup:
    """Everything that an engine is built from."""

    recipe: Recipe
    plan: Plan
    engine_config: dict[str, Any]
    """The rendered backend configuration (`deepspeed.json`, …). Empty for ddp."""
    ranks: "Ranks"
    model_config: "PretrainedConfig"
    weights: "WeightSource"
    """Initial weights, also of adapters."""
    megatron: MegatronModel | None
    """The model in megatron-core's terms. None for `hf`."""
    objective: Objective
    frozen: frozenset[str]
    """Checkpoint tensors that do not train."""
    lora: Lora | None
    """The model's adapters, whose base is `frozen`."""

    @property
    def layout(self) -> Layout:
        """The plan's layout."""
        return self.plan.layout

    @property
    def precision(self) -> str:
        """What the engine computes in."""
        return self.recipe.training.precision

    @property
    def optimizer(self) -> OptimizerSection:
        """The recipe's optimizer."""
        return self.recipe.optimizer

    def settle_kernels(self, model: "PreTrainedModel") -> None:
        """Configure a transformers model as planned, before it is sharded or wrapped."""
        from toolkit.models import compiled, fp8, liger
        from toolkit.models import huggingface as hf

        fp8.convert(model, self.recipe.kernels.fp8)
        hf.chunk_loss(model, self.layout.loss)
        compiled.compile_layers(model, self.layout.compile)
        liger.fuse(model, self.layout.fused)

    def fill_masters(self, state: "Iterable[StateShard]") -> None:
        """Give the fp32 master weights of a 16-bit model their initial values: the engine made
        them from weights that are already rounded."""
        for shard in state:
            if shard.trains and shard.blocks and self.precision != "fp32":
                parts = [self.weights.read_block(block).reshape(-1) for block in shard.blocks]
                shard.put("weight", torch.cat(parts))

    def ends_of(self, batch: MicroBatch) -> "Tensor | None":
        """`batch.ends` for megatron-core's models. None where a mask isolates documents."""
        return batch.ends if self.plan.attention_kernel == "varlen" else None

    def context_group(self) -> "Context | None":
        """The ranks among which the positions of each row are spread. None where a rank has
        them all, or the model spreads them itself, as megatron-core's does. Collective."""
        from toolkit.models.context import Context

        if self.layout.cp == 1 or self.plan.model == "megatron":
            return None
        return Context.of(self.layout)

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
        """The inputs of the engine of `plan`.

        The plan's attention and expert implementations are set in `model_config`. `weights`
        include those of the adapters. Raises PlanError if the loaded `model_config` is not the
        planned one, RecipeError if `model.balance` or `adapter.targets` does not suit the
        model.
        """
        from toolkit.models import documents
        from toolkit.models.huggingface import EXPERTS
        from toolkit.models.weights import checkpoint_names

        parts = [part for one in weights.shapes.items() for part in checkpoint_names(*one)]
        names = [part.name for part in parts]
        frozen = matching(recipe.model.freeze, names)
        lora = lora_of(recipe.adapter, model_config.to_dict())
        if lora is not None:
            frozen = frozenset(names) - lora.shapes.keys()
        megatron = None
        if plan.model == "megatron":
            megatron = megatron_config.loaded_model(recipe.model, model_config.to_dict())
            megatron = lora.adapted(megatron) if lora else megatron
            megatron = replace(megatron, eager=plan.attention == "eager")
        if wrong := [*balance_problems(recipe.model.balance, model_config.to_dict())]:
            raise RecipeError(wrong)
        varlen = plan.attention_kernel == "varlen"
        model_config._attn_implementation = (
            documents.IMPLEMENTATION if varlen else plan.attention
        )
        model_config._experts_implementation = EXPERTS[plan.layout.experts]
        return cls(
            recipe=recipe,
            plan=plan,
            engine_config=engine_config,
            ranks=ranks,
            model_config=model_config,
            weights=weights,
            megatron=megatron,
            objective=recipe.objective(),
            frozen=frozen,
            lora=lora,
        )
