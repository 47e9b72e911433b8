"""What a plan is asked for: the parts of a recipe that rules, cost model and search read."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from toolkit.errors import Problem
from toolkit.models import frozen, parameter_groups
from toolkit.models.adapters import lora
from toolkit.models.families import MegatronModel, mapped, unsupported
from toolkit.models.spec import ModelSpec
from toolkit.recipe.schema import (
    AdapterSection,
    ClusterSection,
    KernelsSection,
    OptimizerSection,
    ParallelSection,
    Recipe,
    TrainingSection,
)
from toolkit.recipe.section import Section


@dataclass(frozen=True)
class PlanRequest:
    """The rules' inputs from a recipe. `config` is valid."""

    parallel: ParallelSection
    cluster: ClusterSection
    training: TrainingSection
    config: Mapping[str, object]
    freeze: tuple[str, ...] = ()
    """The recipe's `model.freeze`."""
    isolates: bool = False
    """The documents of a sequence are isolated."""
    adapter: AdapterSection | None = None
    """The recipe's `adapter`."""
    optimizer: OptimizerSection = field(
        default_factory=lambda: OptimizerSection(learning_rate=1.0)
    )
    kernels: KernelsSection = field(default_factory=KernelsSection)
    has_weights: bool = False
    """Training begins with weights that exist."""

    @classmethod
    def of(
        cls, recipe: Recipe, cluster: ClusterSection, config: Mapping[str, object]
    ) -> "PlanRequest":
        """What the rules read of `recipe` on this cluster, for the model of this `config`."""
        return cls(
            recipe.parallel,
            cluster,
            recipe.training,
            config,
            recipe.model.freeze,
            recipe.data.isolates,
            recipe.adapter,
            recipe.optimizer,
            recipe.kernels,
            recipe.model.init != "random",
        )

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's shape, with its frozen tensors and adapters."""
        return lora.spec_of(self.config, self.freeze, self.adapter)

    @cached_property
    def mapped(self) -> MegatronModel:
        """The model in megatron-core's terms. Its map exists even if it is not expressible."""
        return mapped(self.config)

    @cached_property
    def inexpressible(self) -> str | None:
        """Why megatron-core cannot compute this model exactly. None if it can."""
        return unsupported(self.config)

    @cached_property
    def trained(self) -> frozenset[str]:
        """The checkpoint tensors that train."""
        return lora.trained_tensors(self.config, self.freeze, self.adapter)

    @cached_property
    def divided(self) -> tuple[list[Problem], list[Problem]]:
        """Why transformers, and why megatron-core, cannot freeze a part of a parameter or use
        another learning rate for it."""
        if not self.freeze and not self.optimizer.groups:
            return [], []
        names = frozen.matching(self.freeze, frozen.names_of(self.config))
        adapters = lora.lora_of(self.adapter, self.config)
        model = adapters.adapted(self.mapped) if adapters else self.mapped
        stacked, fused = (
            [
                *frozen.mixed_problems(frozen.KEY, names.__contains__, parameters),
                *frozen.mixed_problems(
                    parameter_groups.KEY,
                    partial(parameter_groups.of_tensor, self.optimizer.groups),
                    ({*tensors} & self.trained for tensors in parameters),
                ),
            ]
            for parameters in (frozen.stacked(self.config), frozen.fused(model))
        )
        return stacked, fused

    def asking(self, **sections: Section) -> "PlanRequest":
        """This job with other sections. What is derived from the model does not depend on them,
        and is kept."""
        other = copy(self)
        vars(other).update(sections)
        return other

    def stating(self, values: Mapping[str, Any]) -> "PlanRequest":
        """The job of a recipe with other values, by dotted setting."""
        settings: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            section, _, setting = key.partition(".")
            settings.setdefault(section, {})[setting] = value
        changed = {name: getattr(self, name).with_values(new) for name, new in settings.items()}
        return self.asking(**changed) if {*changed} <= _INTENT else replace(self, **changed)


_INTENT = {"parallel", "training", "kernels"}
"""Sections that say nothing about the model."""
