"""How Hugging Face Accelerate and transformers' Trainer carry out an engine's plans.

Light, as every `Backend` is: accelerate and torch are imported by the methods that need them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from toolkit.layout import Layout
from toolkit.recipe.dump import dump

if TYPE_CHECKING:
    from torch import nn


class InAccelerate:
    """One engine in Accelerate's words; the defaults are those of torch's DDP.

    `config` is what its `Backend.render` gives. Scripts bring transformers' models:
    megatron-core's has no place there.
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
    """Does Accelerate recompute activations? If not, the model has to."""

    def reduces_every_batch(self, layout: Layout) -> bool:
        """Are gradients reduced after every micro batch? If not, once a step."""
        return False

    def distributed_type(self, world: int) -> str:
        """Accelerate's kind of run. On a CPU, its MULTI_CPU starts one process only."""
        return "MULTI_GPU" if world > 1 else "NO"

    def preset(self, layout: Layout) -> dict[str, Any]:
        """What stands for `config` in the files of `common`."""
        return {}

    def section(self, layout: Layout, precision: str, config: Mapping[str, Any]) -> str:
        """The part of the YAML file that says how to train; `precision` is Accelerate's."""
        return dump({"mixed_precision": precision}, flow=False)

    def prepare_process(self) -> None:
        """Make this process, which has joined the process group, one that can carry it out."""

    def accelerator(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `Accelerator`."""
        import torch

        return {"cpu": not torch.cuda.is_available()}

    def prepare_model(self, accelerator: Any, model: "nn.Module") -> None:
        """Settle what Accelerate's plugin takes from the model, before it wraps that.

        Raises PlanError for a model that does not say it.
        """

    def training_arguments(self, layout: Layout, config: Mapping[str, Any]) -> dict[str, Any]:
        """Keyword arguments of TrainingArguments: values of `fields`."""
        return {}

    def made(self, model: "nn.Module", layout: Layout) -> tuple[str, bool]:
        """What Accelerate made of a model, in words, and whether that is the plan's.

        A single process needs no DDP, and neither does a model that does not train.
        """
        from torch.nn.parallel import DistributedDataParallel

        trains = any(parameter.requires_grad for parameter in model.parameters())
        alone = layout.world == 1 or not trains
        return type(model).__name__, alone or isinstance(model, DistributedDataParallel)
