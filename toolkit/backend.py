"""The light half of each engine: everything except training.

Planner, checks, rehearsal, doctor, rendering and launchers use the `Backend` of an engine and
never compare engine names. The heavy half, which trains, is an `Engine` (engines/base.py).
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from toolkit.errors import PlanError, Problem
from toolkit.layout import (
    EngineName,
    Layout,
    ModelName,
    Placement,
    RecomputeWay,
    Stage,
)
from toolkit.plan.cost.engine import EngineCost
from toolkit.plan.plan import Plan
from toolkit.plan.request import PlanRequest
from toolkit.recipe.dump import dump
from toolkit.recipe.schema import Recipe
from toolkit.registry import ENGINES, Registry

ANY = 65536
"""Largest degree in the schema. It stands for no limit of the pair's own."""

_ON_DEVICE: frozenset[Placement] = frozenset(("none",))


@dataclass(frozen=True)
class Support:
    """What an engine can do with one model implementation. By default, what a plain
    data-parallel engine can do."""

    auto: bool = False
    """Whether `engine: auto` chooses it. Others run when stated, or when no such pair can."""
    degrees: Mapping[str, int] = field(default_factory=dict)
    """Largest degrees, by the recipe's names: `tensor`, …. 1 where one is missing."""
    sequence: bool = False
    """Sequence parallel inside the tensor group."""
    zero_stages: tuple[Stage, ...] = (0,)
    """ZeRO stages. In engine megatron, 1 is megatron-core's distributed optimizer."""
    zero_config: bool = False
    """Whether the engine reads DeepSpeed's `parallel.zero.config` and `extra`."""
    offload_optimizer: frozenset[Placement] = field(default=_ON_DEVICE)
    offload_parameters: frozenset[Placement] = field(default=_ON_DEVICE)
    offload_together: bool = False
    """Whether optimizer states and parameters are always on the same device."""
    recompute: tuple[RecomputeWay, ...] = ("none", "full")
    """Activation recompute. `selective` is megatron-core's own attention recompute."""
    kernel_stages: tuple[Stage, ...] = ()
    """In which ZeRO stages decoder layers may be compiled, and have products in 8 bits."""

    def largest(self, degree: str) -> int:
        return self.degrees.get(degree, 1)


class Rehearsed(NamedTuple):
    """A layout of an engine that every rehearsal tries."""

    name: str
    model: ModelName
    layout: Layout


class InAccelerate:
    """One engine's configuration of Accelerate. The defaults are those of torch's DDP.

    `config` is the output of its `Backend.render`. Scripts use transformers' models.
    megatron-core's is not supported.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of TrainingArguments that state the engine."""
    notes: ClassVar[tuple[str, ...]] = ()
    """Lines for the head of a file: where a setting means something else than in a recipe."""
    recomputes: ClassVar[bool] = False
    """Whether Accelerate enables recompute. Otherwise the model does."""

    def reduces_every_batch(self, layout: Layout) -> bool:
        """Are gradients reduced after every micro batch? If not, once a step."""
        return False

    def distributed_type(self, world: int) -> str:
        """Accelerate's kind of run. On a CPU, its MULTI_CPU starts one process only."""
        return "MULTI_GPU" if world > 1 else "NO"

    def section(self, layout: Layout, precision: str, config: Mapping[str, Any]) -> str:
        """The part of the YAML file that configures training. `precision` is Accelerate's."""
        return dump({"mixed_precision": precision}, flow=False)

    def mesh(self, layout: Layout) -> dict[str, object]:
        """Accelerate's `ParallelismConfig` by the names of its fields. Empty: not needed."""
        return {}

    def prepare_process(self) -> None:
        """Prepare this process, which has joined the process group."""

    def accelerator(
        self, layout: Layout, precision: str, config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Keyword arguments of `Accelerator`."""
        import torch

        return {"cpu": not torch.cuda.is_available()}

    def complete(self, accelerator: Any, settings: Mapping[str, Any]) -> None:
        """Set in an Accelerator what its constructor left out of `settings`, the arguments in
        `accelerator`."""

    def training_arguments(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of TrainingArguments: values of `fields`."""
        return {}


class Backend:
    """All engine-specific parts, without torch. The defaults are those of a plain data-parallel
    engine that reads no configuration."""

    name: ClassVar[EngineName]
    engine: ClassVar[str]
    """`module:class` of the engine that trains."""
    supports: ClassVar[Mapping[ModelName, Support]]
    """Support by model implementation. One that is missing is refused."""
    packages: ClassVar[tuple[str, ...]] = ()
    """Distributions that it needs besides torch and transformers."""
    device_variable: ClassVar[str] = ""
    """The environment variable by which its users choose `cpu` or another device."""
    configured: ClassVar[bool] = False
    """Whether it reads a configuration (`NAME.json` in the run directory)."""
    distributed_types: ClassVar[tuple[str, ...]] = ()
    """Values of Accelerate's `distributed_type` that mean this engine."""
    accelerate: ClassVar[InAccelerate | None] = None
    """How Accelerate carries out its plans. None where it cannot."""
    rehearsals: ClassVar[tuple[Rehearsed, ...]] = ()
    """In which layouts `dmt rehearse` tries it."""
    cost: ClassVar[EngineCost]
    """The engine's memory, traffic and time terms."""

    def adopt(self, recipe: Recipe) -> Recipe:
        """The recipe, with the values that the engine's own file decides, if the recipe names
        one."""
        return recipe

    def render(self, recipe: Recipe, layout: Layout) -> dict[str, Any]:
        """The engine's complete configuration. Empty without one.

        Raises RecipeError where a file that the recipe names disagrees with the recipe.
        """
        return {}

    def shown(self, recipe: Recipe, plan: Plan) -> dict[str, Any] | None:
        """The text that `dmt render --to NAME` prints. None if it has no part in the plan."""
        return self.render(recipe, plan.layout) if plan.engine == self.name else None

    def environment(self, layout: Layout, gpu: str) -> dict[str, str]:
        """Variables that must be set before a worker first touches its GPU.

        One queue to the GPU keeps tensor-parallel communication ahead of the products that
        hide it (megatron-core's own advice up to Hopper). It would slow ZeRO-3's gathers.
        """
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        if gpu == "cpu" or layout.tp == 1 or name in os.environ:
            return {}
        return {name: "1"}

    def prepare(self, config: Mapping[str, Any], report: Callable[[str], None]) -> None:
        """Check for and build what the engine compiles on this machine.

        Raises BackendUnavailable naming what is missing and how to get it.
        """

    def operators(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the operators that `prepare` would compile."""
        return ()

    def refusal(self, job: PlanRequest, model: ModelName) -> Problem | None:
        """Why the engine cannot train this model at all, with the nearest way out."""
        return None

    def rules(self, job: PlanRequest, model: ModelName) -> Iterator[Problem]:
        """What else the engine cannot do with this model and batch."""
        return iter(())

    def approximations(
        self, plan: Plan, precision: str, config: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Entries of the ledger: engine-specific rounding and sums."""
        return iter(())


BACKENDS: Registry[Backend] = ENGINES
"""Every engine's backend by its name."""


def adopt_engine_config(recipe: Recipe) -> Recipe:
    """The recipe, with the values that the engine's own file decides, if the recipe names one.

    Raises PlanError for what is no recipe. Callers of the Python API at times pass a recipe's
    name.
    """
    if not isinstance(recipe, Recipe):
        fix = "read a file, or a shipped recipe by its name, with load_recipe(…)"
        raise PlanError(f"{recipe!r:.80} is no Recipe", fix=fix)
    for name in BACKENDS.names:
        recipe = BACKENDS[name].adopt(recipe)
    return recipe
