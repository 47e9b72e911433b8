"""The pipeline's timetable: when each rank computes which micro batch.

1F1B and its interleaved form (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), with
the warm-up and the order of chunks that megatron-core uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Direction = Literal["forward", "backward"]


class _Pass(NamedTuple):
    """One micro batch through one chunk of a rank's layers."""

    direction: Direction
    micro_batch: int
    chunk: int


class Slot(NamedTuple):
    """A pass with its times, in seconds since the step began."""

    rank: int
    direction: Direction
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float
    sent_s: float
    """When its result has arrived at the neighbour; the rank waits for that."""


@dataclass(frozen=True)
class Timetable:
    """All passes of one step on all pipeline ranks."""

    slots: tuple[tuple[Slot, ...], ...]
    """By pipeline rank, each in order of time."""

    @property
    def total_s(self) -> float:
        """Until the last rank is done."""
        return max(rank[-1].sent_s for rank in self.slots)

    def idle_s(self, rank: int) -> float:
        """The time that `rank` waits for others: the bubble."""
        return self.total_s - sum(slot.sent_s - slot.start_s for slot in self.slots[rank])


def timetable(
    stages: Sequence[tuple[float, float]],
    micro_batches: int,
    vpp: int = 1,
    message_s: float = 0.0,
) -> Timetable:
    """The schedule of `micro_batches` on pipeline ranks with these times of both passes of one,
    and of a message to the neighbour; `vpp` chunks each.

    A pass starts when its rank is free and its input has arrived. With vpp > 1, micro
    batches must be a multiple of the number of ranks.
    """
    assert vpp == 1 or micro_batches % len(stages) == 0, "refused at check"
    orders = [_order(rank, len(stages), micro_batches, vpp) for rank in range(len(stages))]
    arrived: dict[tuple[int, _Pass], float] = {}
    done: list[list[Slot]] = [[] for _ in stages]
    while len(arrived) < sum(map(len, orders)):
        for rank, order in enumerate(orders):
            while len(done[rank]) < len(order):
                one = order[len(done[rank])]
                source = _source(rank, one, len(stages), vpp)
                if source is not None and source not in arrived:
                    break  # another rank has to continue first
                free_s = done[rank][-1].sent_s if done[rank] else 0.0
                start_s = max(free_s, arrived[source] if source else 0.0)
                duration_s = stages[rank][one.direction == "backward"] / vpp
                sent_s = 0.0 if _is_last(rank, one, len(stages), vpp) else message_s
                end_s = start_s + duration_s
                slot = Slot(rank, *one, start_s, end_s, end_s + sent_s)
                done[rank].append(slot)
                arrived[rank, one] = slot.sent_s
    return Timetable(tuple(map(tuple, done)))


def _order(rank: int, pp: int, micro_batches: int, vpp: int) -> list[_Pass]:
    """The passes of a rank in the order of the schedule: forward passes until the pipeline
    is full, then one backward after each forward, then the backward passes that are left."""
    forward = [_Pass("forward", *place) for place in _chunks(pp, micro_batches, vpp)]
    backward = [
        _Pass("backward", micro_batch, vpp - 1 - chunk)
        for micro_batch, chunk in _chunks(pp, micro_batches, vpp)
    ]
    ahead = pp - rank - 1 if vpp == 1 else 2 * (pp - rank - 1) + (vpp - 1) * pp
    ahead = min(ahead, len(forward))
    order = forward[:ahead]
    for one, other in zip(forward[ahead:], backward, strict=False):
        order += [one, other]
    return order + backward[len(forward) - ahead :]


def _chunks(pp: int, micro_batches: int, vpp: int) -> list[tuple[int, int]]:
    """(micro batch, chunk) in order: `pp` micro batches through one chunk, then the next."""
    return [
        (first + offset, chunk)
        for first in range(0, micro_batches, pp)
        for chunk in range(vpp)
        for offset in range(min(pp, micro_batches - first))
    ]


def _source(rank: int, one: _Pass, pp: int, vpp: int) -> tuple[int, _Pass] | None:
    """The pass that produces the input of `one`; None for the first of a micro batch.

    Layers run through the ranks' first chunks, then through their second ones, and so on.
    """
    step = 1 if one.direction == "forward" else -1
    place = one.chunk * pp + rank - step
    if 0 <= place < pp * vpp:
        return place % pp, one._replace(chunk=place // pp)
    if one.direction == "backward":
        return rank, one._replace(direction="forward")
    return None


def _is_last(rank: int, one: _Pass, pp: int, vpp: int) -> bool:
    """Whether a pass is the last in its direction, which sends nothing."""
    return one.chunk * pp + rank == (pp * vpp - 1 if one.direction == "forward" else 0)
