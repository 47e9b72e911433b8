"""Engine-specific costs: the planner's interface to a `Backend`."""

from typing import ClassVar, Literal

from toolkit.layout import Layout, ModelName
from toolkit.plan.cost.stages import StageShare

FP32_BYTES = 4


class EngineCost:
    """The defaults are those of an engine that shards and casts nothing, in fp32."""

    fp32_states: ClassVar[bool] = True
    """Weights that are updated, gradients and moments are fp32 at any precision. 16-bit copies
    of the weights are in `buffers`."""
    sharded_weights_from: ClassVar[int] = 3
    """The ZeRO stage from which a rank updates and stores only its shard of the weights."""
    whole_experts: ClassVar[bool] = False
    """A rank's shard of a layer's stacked experts consists of whole experts: if there are fewer
    experts than ranks, only that many ranks hold one, and they are gathered with padding for
    the others."""
    sends_fp32_weights: ClassVar[bool] = False
    """Only the fp32 weights are transferred for offload."""
    sums_whole_gradients: ClassVar[bool] = False
    """Gradients of micro batches are added to a whole fp32 sum on the device."""
    gathers_beside_forward: ClassVar[bool] = True
    """With a sharded optimizer, gathering weights overlaps with the next step's forward pass.
    Otherwise it does not overlap."""
    megatron_kernels: ClassVar[bool] = False
    """Norms are one kernel, and if elementwise operators are fused, attention is Transformer
    Engine's."""
    selective: ClassVar[Literal["attention", "products"]] = "attention"
    """What `recompute: selective` recomputes: attention (Megatron), or per operator every
    second matrix product and all cheap operators (torchtitan)."""
    overlap: ClassVar[str] = "overlap.ddp"
    """The constant of `efficiency.py` for the slow-down of computation by traffic."""

    def communicators(self, layout: Layout) -> int:
        """NCCL's communicators of two or more ranks that a rank uses: one of all ranks, and one
        for each group that is smaller."""
        both = 2 * (layout.replicate > 1)  # of the shards, and of their copies
        split = (layout.tp > 1) * (1 + (layout.dp * layout.cp > 1))
        return (layout.world > 1) + both + split + (layout.cp > 1)

    def builds_whole(self, model: ModelName, layout: Layout) -> bool:
        """Whether a tensor-parallel rank's model is completely on the device before it is
        sharded."""
        return False

    def whole_gradients(self, layout: Layout) -> bool:
        """Does a rank hold the gradients of all parameters that it computes with, not only of
        its shard?"""
        return layout.zero_stage < 2

    def gradient_copies(self, layout: Layout, width: int) -> tuple[int, int]:
        """How often offload copies each fp32 gradient of a shard between device and host: in
        every backward pass, and besides in a step's last one. `width`: as of `buffers`."""
        return (1, 0) if layout.zero_stage >= 2 else (0, 1)

    def logit_bytes(self, width: int, tp: int) -> int:
        """Bytes of logits and loss at their peak, per logit: PyTorch's cross entropy keeps the
        fp32 log softmax and allocates its gradient and that of the logits in addition."""
        return 3 * FP32_BYTES

    def buffers(self, layout: Layout, width: int, share: StageShare) -> float:
        """Bytes of buckets, gathered and cast weights in a layer's backward pass. `width` is
        the compute dtype's bytes per element."""
        return 0.0

    def buffers_at_loss(self, layout: Layout, width: int, share: StageShare) -> float:
        """Buffers between the forward and the backward pass."""
        return self.buffers(layout, width, share)

    def buffers_at_end(self, layout: Layout, width: int, share: StageShare) -> float:
        """Bytes of buffers when the backward pass is at the embedding and no activation is
        left."""
        return 0.0

    def keeps_gradients(self, width: int) -> bool:
        """Whether ZeRO 2 sums gradients on the device although the optimizer is offloaded."""
        return False


def in_place_logit_bytes(width: int) -> int:
    """megatron-core's loss: a cast to fp32 becomes the softmax and then the gradient in place,
    next to a 16-bit tensor."""
    return FP32_BYTES + (width if width < FP32_BYTES else 0)
