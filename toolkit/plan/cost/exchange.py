"""What the ranks of a context group exchange in a layer's attention.

Each rank computes two of the 2·cp equal runs of a row, one from each end, so that under a
causal mask all have equal work (Llama 3, arXiv:2407.21783, section 3.3.2). They gather keys and
values (`all_gather`), or send each other heads, so that each attends with a part of them
(`ulysses`); keys of fewer heads than ranks are repeated.
"""

from dataclasses import dataclass
from math import lcm

from toolkit.layout import Exchange
from toolkit.plan.cost.workload import Workload


@dataclass(frozen=True)
class ContextSplit:
    """Elements of attention on a rank of a context group, for one layer and micro batch."""

    cp: int
    heads: int
    """Ranks that split attention by heads; 1 where keys and values are gathered."""
    query: float
    """Queries of its own positions; equal to attention's output."""
    key: float
    """Keys of its own positions; equal to the values."""
    sent_key: float
    """The same when heads are sent: repeated where the keys have fewer heads than ranks."""

    @property
    def attended_key(self) -> float:
        """Keys that attention keeps for its backward pass."""
        return self.key * self.cp if self.heads == 1 else self.sent_key

    @property
    def received(self) -> float:
        """Elements that a rank receives in a forward pass."""
        if self.heads == 1:
            return 2 * self.key * (self.cp - 1)
        return 2 * (self.query + self.sent_key) * (self.heads - 1) / self.heads

    @property
    def kept(self) -> float:
        """What is kept besides queries, keys, values and the output: that output before the
        heads were sent back, or of the two runs each for itself."""
        return self.query if self.cp > 1 else 0.0

    @property
    def buffers(self) -> float:
        """Elements that are sent and received at once: those that are gathered before they are
        put in order, or those of all heads that are sent."""
        gathered = 2 * self.attended_key
        return gathered if self.heads == 1 else self.query + gathered


def context_split(
    workload: Workload, exchange: Exchange, tp: int, cp: int, tokens: float
) -> ContextSplit:
    """The exchange of `tokens` on each rank."""
    spec = workload.spec
    keys = max(1, spec.kv_heads // tp)
    heads = cp if exchange == "ulysses" else 1
    of_heads = tokens * spec.head_dim
    key = of_heads * spec.kv_heads / tp
    repeated = lcm(keys, heads) // keys
    return ContextSplit(cp, heads, of_heads * spec.heads / tp, key, key * repeated)
