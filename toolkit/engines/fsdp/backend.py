"""Engine `fsdp` for everyone who does not train with it."""

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.backend import ANY, Backend, Rehearsed, Support
from toolkit.engines.fsdp import config as fsdp_config
from toolkit.engines.fsdp.accelerate import FsdpInAccelerate
from toolkit.layout import Layout, Placement
from toolkit.plan.cost.engine import FP32_BYTES, EngineCost
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe

GATHERED_LAYERS = 2
"""Layers whose weights are held gathered: the one in use and the one that is prefetched."""
_CPU: frozenset[Placement] = frozenset(("none", "cpu"))


class FsdpCost(EngineCost):
    """FSDP2's shards, as `fully_shard` with one unit per decoder layer works."""

    sharded_weights_from = 1  # what stages 1 and 2 keep gathered is in `buffers`
    sends_fp32_weights = True
    whole_experts = True
    selective = "products"
    overlap = "overlap.fsdp"

    def logit_bytes(self, width: int, tp: int) -> int:
        """Over a tensor group (loss_parallel), cross entropy keeps the softmax, too."""
        return (4 if tp > 1 else 3) * FP32_BYTES

    def whole_gradients(self, layout: Layout) -> bool:
        """True where stage 1 adds up the gradients of micro batches before it reduces them."""
        return layout.zero_stage < 2 and layout.gradient_accumulation > 1

    def buffers(self, layout: Layout, width: int, share: StageShare) -> float:
        """Weights that FSDP gathers, and gradients before they are scattered.

        Layers and an embedding of its own come and go, the head stays gathered from the forward
        to the backward pass. The gradients of a layer or a head are there twice: in compute
        precision and, copied, in the fp32 of the reduce-scatter. A head that is the embedding,
        or runs in chunks, keeps its gradient until the embedding's is there.
        """
        share = _managed(layout, share)
        largest = (share.dense + share.experts) / share.layers
        head, gathered = share.trained.output, share.vocabulary + GATHERED_LAYERS * largest
        if _own_units(layout, share):
            gathered -= share.vocabulary - share.output
            head, largest = 0.0, max(largest, head)
        if layout.zero_stage < 3:
            gathered = share.parameters
        return width * (gathered + head) + (width + FP32_BYTES) * largest

    def buffers_at_loss(self, layout: Layout, width: int, share: StageShare) -> float:
        """The gathered head, and what was reduced last in the micro batch before. That stays
        until the next backward pass reduces something."""
        share = _managed(layout, share)
        kept, last = share.vocabulary, share.trained.vocabulary
        if _own_units(layout, share):
            kept, last = share.output, share.vocabulary - share.output
        if layout.zero_stage < 3:
            kept = share.parameters
        reduced_before = layout.zero_stage > 1 and layout.gradient_accumulation > 1
        return width * kept + FP32_BYTES * last * reduced_before


def _managed(layout: Layout, share: StageShare) -> StageShare:
    """The weights that FSDP2 gathers and reduces. It leaves frozen ones alone where a rank has
    all of every parameter."""
    whole = layout.dp * layout.cp == layout.replicate and layout.offload_parameters == "none"
    return share.trained if whole else share


def _own_units(layout: Layout, share: StageShare) -> bool:
    """Whether embedding and head are gathered each for itself."""
    return layout.loss == "whole" and share.vocabulary > share.output


class FsdpBackend(Backend):
    """torch's FSDP2.

    Left out of `auto`: what the planner knows of its speed was measured in other trainers,
    with torch.compile, and what it knows of DeepSpeed's is assumed to be the same. So it
    cannot tell which of the two is faster.
    """

    name = "fsdp"
    engine = "toolkit.engines.fsdp.engine:FsdpEngine"
    supports = {
        "hf": Support(
            zero_stages=(1, 2, 3),
            degrees={"replicate": ANY, "context": ANY},
            offload_optimizer=_CPU,
            offload_parameters=_CPU,
            offload_together=True,
            kernel_stages=(1, 2, 3),
        )
    }
    configured = True
    distributed_types = ("FSDP",)
    accelerate = FsdpInAccelerate()
    cost = FsdpCost()
    rehearsals = (
        Rehearsed("fsdp1", "hf", Layout(dp=2, zero_stage=1)),
        Rehearsed("fsdp2", "hf", Layout(dp=2, zero_stage=2)),
        Rehearsed("fsdp3", "hf", Layout(dp=2, zero_stage=3)),
        Rehearsed("fsdp3-cp2", "hf", Layout(cp=2, zero_stage=3)),
    )

    def render(self, recipe: Recipe, layout: Layout) -> dict[str, Any]:
        """`fsdp.json`."""
        return fsdp_config.render(layout, recipe.training.precision)

    def approximations(
        self, plan: Plan, precision: str, config: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """The entry for AdamW that runs on the CPU, if it does."""
        if plan.layout.offload_optimizer != "none":
            yield "offloaded AdamW", "the CPU's rounds in another order than a GPU's"


BACKEND = FsdpBackend()
