"""How an engine's plans run in Hugging Face Accelerate and transformers' Trainer.

Light, as every `Backend` is: accelerate and torch are imported by the methods that need them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.layout import Layout
from toolkit.recipe.dump import dump

if TYPE_CHECKING:
    from torch import nn


class InAccelerate:
    """One engine's configuration of Accelerate; the defaults are those of torch's DDP.

    `config` is the output of its `Backend.render`. Scripts use transformers' models;
    megatron-core's is not supported.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of TrainingArguments that state the engine."""
    common: ClassVar[Mapping[str, Layout]] = {}
    """Files of `launch/accelerate/` by name, each with its layout."""
    common_options: ClassVar[tuple[str, ...]] = ()
    """Options of `accelerate launch` that those files need."""
    notes: ClassVar[tuple[str, ...]] = ()
    """Lines for the head of a file: where a setting means something else than in a recipe."""
    recomputes: ClassVar[bool] = False
    """Whether Accelerate enables recompute; otherwise the model does."""

    def reduces_every_batch(self, layout: Layout) -> bool:
        """Are gradients reduced after every micro batch? If not, once a step."""
        return False

    def distributed_type(self, world: int) -> str:
        """Accelerate's kind of run. On a CPU, its MULTI_CPU starts one process only."""
        return "MULTI_GPU" if world > 1 else "NO"

    def preset(self, layout: Layout) -> dict[str, Any]:
        """The replacement of `config` in the files of `common`."""
        return {}

    def section(self, layout: Layout, precision: str, config: Mapping[str, Any]) -> str:
        """The part of the YAML file that configures training; `precision` is Accelerate's."""
        return dump({"mixed_precision": precision}, flow=False)

    def prepare_process(self) -> None:
        """Prepare this process, which has joined the process group."""

    def accelerator(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `Accelerator`."""
        import torch

        return {"cpu": not torch.cuda.is_available()}

    def prepare_model(self, accelerator: Any, model: "nn.Module") -> None:
        """Set what Accelerate's plugin reads from the model, before it wraps the model.

        Raises PlanError for a model that does not define it.
        """

    def training_arguments(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of TrainingArguments: values of `fields`."""
        return {}

    def made(self, model: "nn.Module", layout: Layout) -> tuple[str, bool]:
        """A description of how Accelerate wrapped a model, and whether that matches the plan.

        A single process needs no DDP, and neither does a model that does not train.
        """
        from torch.nn.parallel import DistributedDataParallel

        trains = any(parameter.requires_grad for parameter in model.parameters())
        alone = layout.world == 1 or not trains
        return type(model).__name__, alone or isinstance(model, DistributedDataParallel)
