"""Blocks of ring attention on CUDA: a run of all rows and another one, by FlashAttention."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import BackendUnavailable
from toolkit.models.context.runs import SplitRows, ends_within
from toolkit.models.documents import Scores

_FORWARD: Any = torch.ops.aten._flash_attention_forward
_BACKWARD: Any = torch.ops.aten._flash_attention_backward
"""What `torch.nn.attention.varlen` calls, whose autograd ignores the log-sum-exp."""


@dataclass(frozen=True)
class RunPair:
    """A run of queries and one of keys, of all rows: documents have some of both, or of one."""

    queries: slice
    keys: slice
    query_ends: Tensor
    key_ends: Tensor
    longest: int
    """No document has more of a run."""
    square: bool
    """Whether they are the same run; if not, the keys are before the queries."""
    scores: Scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `AttentionBlock.forward`; -inf as the log-sum-exp of no keys."""
        inputs = q[self.queries], k[self.keys], v[self.keys]
        out, lse, *_ = _FORWARD(*inputs, *self._ends, 0.0, self.square, False, **self._scale)
        sees = _met(self.query_ends, self.key_ends, len(inputs[0]))
        return _where(sees, out), torch.where(sees[:, None], lse.mT, float("-inf"))

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Iterator[Tensor]:
        """See `AttentionBlock.backward`."""
        inputs = q[self.queries], k[self.keys], v[self.keys]
        gradient, out = (x[self.queries].contiguous() for x in (gradient, out))
        lse, no = lse[self.queries].mT.contiguous(), torch.empty(0, device=q.device)
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout
        rest = 0.0, self.square, random, no
        of_q, *of_kv = _BACKWARD(gradient, *inputs, out, lse, *self._ends, *rest, **self._scale)
        yield _where(_met(self.query_ends, self.key_ends, len(of_q)), of_q)
        for x in of_kv:
            yield _where(_met(self.key_ends, self.query_ends, len(x)), x)

    @property
    def _ends(self) -> tuple[Tensor, Tensor, int, int]:
        return self.query_ends, self.key_ends, self.longest, self.longest

    @property
    def _scale(self) -> dict[str, float | None]:
        return {"scale": self.scores.scale}


def _where(met: Tensor, x: Tensor) -> Tensor:
    return torch.where(met[:, None, None], x, 0.0)


def _met(ends: Tensor, others: Tensor, count: int) -> Tensor:
    """bool [count]: of the positions of `ends`, which have others in their document. What a
    kernel returns for the rest is not defined."""
    place = torch.arange(count, dtype=ends.dtype, device=ends.device)
    document = torch.searchsorted(ends, place, right=True) - 1
    return (others.diff() > 0)[document]


def visible(rows: SplitRows, other: int, scores: Scores) -> Iterator[RunPair]:
    """As `blocks.visible`, without asking the GPU how long documents are. The first pair of a
    query has its own position.

    Raises BackendUnavailable for windows and caps.
    """
    if scores.window is not None or scores.cap is not None:
        raise BackendUnavailable(
            "kernels.context ring takes neither windows nor capped scores on CUDA: "
            "FlashAttention counts a window from the end of a block",
            fix="set kernels.context to all_gather",
        )
    positions = rows.batch * rows.run
    of_run = [slice(number * positions, (number + 1) * positions) for number in (0, 1)]
    runs = rows.bounds(rows.rank), rows.bounds(other)
    for q_run, k_run in product((0, 1), (1, 0)):
        q, k = runs[0][q_run], runs[1][k_run]
        if k[0] <= q[0]:
            q_ends, k_ends = (ends_within(rows.ends, rows.length, *run) for run in (q, k))
            slices = of_run[q_run], of_run[k_run]
            yield RunPair(*slices, q_ends, k_ends, rows.run, q == k, scores)
