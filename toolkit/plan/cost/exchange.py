"""What the ranks of a context group exchange in a layer's attention.

Each rank computes two of the 2·cp equal runs of a row, one from each end, so that under a
causal mask all have equal work (Llama 3, arXiv:2407.21783, section 3.3.2). They

- gather keys and values (`all_gather`),
- send each other heads, so that each attends with a part of them (`ulysses`); keys of fewer
  heads than ranks are repeated,
- pass keys and values around while they attend (`ring`), or
- do the second among as many ranks as divide the heads of the keys, and the third between
  these groups (`ulysses_ring`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from toolkit.layout import Exchange, head_ranks
from toolkit.plan.cost.workload import Workload

SOURCES: Mapping[Exchange, str] = {
    "all_gather": "keys and values gathered, their gradients scattered: Llama 3, "
    "arXiv:2407.21783, section 3.3.2",
    "ulysses": "queries, keys, values and output sent by heads: DeepSpeed Ulysses, "
    "arXiv:2309.14509, section 3.1",
    "ring": "keys and values travel while others are computed, then with their gradients: Ring "
    "Attention, arXiv:2310.01889, section 3",
    "ulysses_ring": "heads are sent within rings' members, between which keys and values "
    "travel: USP, arXiv:2405.07719, section 3.3",
}


@dataclass(frozen=True)
class ContextSplit:
    """Elements of attention on a rank of a context group, for one layer and micro batch."""

    exchange: Exchange
    cp: int
    heads: int
    """Ranks that split attention by heads."""
    query: float
    """Queries of its own positions; equal to attention's output."""
    key: float
    """Keys of its own positions; equal to the values."""
    sent_key: float
    """The same when heads are sent: repeated where the keys have fewer heads than ranks."""

    @property
    def rings(self) -> int:
        """Ranks between which keys and values travel."""
        return self.cp // self.heads if self.exchange in ("ring", "ulysses_ring") else 1

    @property
    def attended_key(self) -> float:
        """Keys that attention keeps for its backward pass."""
        return self.key * self.cp if self.exchange == "all_gather" else self.sent_key

    @property
    def received(self) -> float:
        """Elements that a rank receives in a forward pass."""
        if self.exchange == "all_gather":
            return 2 * self.key * (self.cp - 1)
        of_heads = 2 * (self.query + self.sent_key) * (self.heads - 1) / self.heads
        return of_heads + 2 * self.sent_key * (self.rings - 1)

    @property
    def kept(self) -> float:
        """What is kept besides queries, keys, values and the output: that output before the
        heads were sent back, or of the two runs each for itself; rings put it in its place."""
        gathers = self.exchange == "all_gather" and self.cp > 1
        return self.query if gathers or self.heads > 1 else 0.0

    @property
    def buffers(self) -> float:
        """Elements that are sent and received at once: keys and values of this and the next
        rank of a ring, those that are gathered before they are put in order, or those of all
        heads that are sent."""
        passed = 4 * self.sent_key if self.rings > 1 else 0.0
        if self.exchange == "all_gather":
            return 2 * self.attended_key
        return passed + (self.query + 2 * self.sent_key if self.heads > 1 else 0.0)


def context_split(
    workload: Workload, exchange: Exchange, tp: int, cp: int, tokens: float
) -> ContextSplit:
    """Of `tokens` on each rank."""
    spec, split = workload.spec, workload.head_ranks(tp)
    keys = max(1, spec.kv_heads // split)
    heads = head_ranks(exchange, cp, keys)
    of_heads = tokens * spec.head_dim
    key = of_heads * spec.kv_heads / split
    repeated = lcm(keys, heads) // keys
    return ContextSplit(exchange, cp, heads, of_heads * spec.heads / split, key, key * repeated)
