"""Attention by plain products, `eager`: what it keeps and moves per score.

Counted in the operators of transformers' `eager_attention_forward` (models/llama, gemma2 and
gpt_oss) and of our megatron-core layers' `EagerAttention` (models/megatron/attention.py). Both
repeat keys and values for each query head, and add or fill in a mask; dropout is 0.
"""

from typing import NamedTuple

from toolkit.models.spec import Scores
from toolkit.plan.cost.engine import FP32_BYTES
from toolkit.plan.cost.workload import Workload


class ScoreTensors(NamedTuple):
    """Tensors with one element per score: in the compute precision, and in fp32."""

    narrow: float
    wide: float
    cast: bool = True
    """In 16 bits, the weights are a copy of fp32 ones; in fp32 there is no such copy."""

    def nbytes(self, width: int) -> float:
        """Bytes per score where `width` is the compute precision's."""
        copies = self.cast and width == FP32_BYTES
        return width * (self.narrow - copies) + FP32_BYTES * self.wide


class Eager(NamedTuple):
    """One implementation of it, by what it does to the scores."""

    kept: ScoreTensors
    """For the backward pass."""
    workspace: ScoreTensors
    """Alive at once in its backward pass besides what is kept and not yet freed."""
    forward: ScoreTensors
    """Read or written in the forward pass, the two products left out."""
    backward: ScoreTensors


# Backward: gradients of the weights are cast to fp32 (the weights are free), and the softmax
# makes those of the scores: two in fp32, one in 16 bits less. What is read or written, forward
# and backward: scale 2 and 2, mask 2 and 0, casts 2 + 2 wide each way, softmax 2 and 3 wide; a
# soft cap divides (2 and 2), takes the tanh (2 and 3) and multiplies (2 and 2).
_PLAIN = Eager(
    kept=ScoreTensors(1, 1),
    workspace=ScoreTensors(-1, 2),
    forward=ScoreTensors(6, 4, cast=False),
    backward=ScoreTensors(4, 5, cast=False),
)
_CAPPED = Eager(
    kept=ScoreTensors(2, 1),
    workspace=ScoreTensors(-1, 2),
    forward=ScoreTensors(12, 4, cast=False),
    backward=ScoreTensors(11, 5, cast=False),
)
_TRANSFORMERS = {
    "plain": _PLAIN,
    "capped": _CAPPED,
    # All in the compute precision: concatenated with the sinks, less the largest, softmax.
    # Backward, the gradient of what was cut off is written into zeros, as is the maximum's.
    "sinks": Eager(
        kept=ScoreTensors(1, 0, cast=False),
        workspace=ScoreTensors(2, 0, cast=False),
        forward=ScoreTensors(11, 0, cast=False),
        backward=ScoreTensors(13, 0, cast=False),
    ),
}
_MEGATRON = {
    "plain": _PLAIN,
    "capped": _CAPPED,
    # In fp32, the scores are concatenated with the sinks (2 wide). Backward, the gradient of
    # what was cut off is written into zeros (3 wide).
    "sinks": Eager(
        kept=ScoreTensors(1, 1),
        workspace=ScoreTensors(-1, 3),
        forward=ScoreTensors(6, 6, cast=False),
        backward=ScoreTensors(4, 8, cast=False),
    ),
}
_COMPILED = Eager(
    kept=ScoreTensors(2, 0, cast=False),
    workspace=ScoreTensors(2, 0, cast=False),
    forward=ScoreTensors(2, 0, cast=False),
    backward=ScoreTensors(3, 0, cast=False),
)
"""torch.compile keeps the first product and the weights, and makes the rest again: what
inductor's graphs of gemma2's layers keep."""


def eager(workload: Workload) -> Eager:
    """That of a workload whose attention is `eager`."""
    if workload.fused_elementwise:
        return _COMPILED
    scores: Scores = workload.spec.scores
    return (_MEGATRON if workload.megatron_layers else _TRANSFORMERS)[scores]
