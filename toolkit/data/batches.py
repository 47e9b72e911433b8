"""Global batches, and each rank's share of them, cut into micro batches.

A global batch is a list of samples. The layout only decides which rank computes which of them.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from toolkit.batch import MicroBatch
from toolkit.data.order import Order
from toolkit.data.rows import Int64Array, Row, Samples
from toolkit.recipe.batch_sizes import BatchSizes

_PADDING = -1
"""Placeholder for a fully masked sample."""


class GlobalBatches:
    """The endless sequence of global batches of training, across epochs."""

    def __init__(self, dataset: Samples, order: Order, sizes: BatchSizes) -> None:
        self._dataset = dataset
        self._order = order
        self.sizes = sizes

    def micro_batches(
        self, consumed_samples: int, dp_rank: int, sizes: Sequence[int]
    ) -> list[MicroBatch]:
        """This rank's micro batches of the global batch that starts at `consumed_samples`.

        `sizes`: samples of a micro batch of each data-parallel rank. The shares of all ranks in
        order form the global batch, which must be a multiple of their sum.
        """
        size = self.sizes.at_sample(consumed_samples)
        share = _share(self._order.indices(consumed_samples, size), dp_rank, sizes)
        return _micro_batches(self._dataset, share, sizes[dp_rank])


def evaluation_batches(
    dataset: Samples,
    global_batch_size: int,
    batches: int,
    dp_rank: int,
    sizes: Sequence[int],
) -> list[MicroBatch]:
    """This rank's micro batches of the first `batches` global batches, in fixed order.

    A smaller data set is used completely, each sample once. Its last global batch is padded
    with fully masked samples, so that every rank has the same number of micro batches.
    """
    n_samples = min(len(dataset), batches * global_batch_size)
    indices = np.arange(n_samples, dtype=np.int64)
    found = batches_of(dataset, indices, global_batch_size, dp_rank, sizes)
    return [micro_batch for micro_batches in found for micro_batch in micro_batches]


def batches_of(
    dataset: Samples,
    indices: Int64Array,
    global_batch_size: int,
    dp_rank: int,
    sizes: Sequence[int],
) -> Iterator[list[MicroBatch]]:
    """This rank's micro batches of each global batch of the samples `indices`, in order.

    The last global batch is filled up with fully masked samples.
    """
    padding = np.full(-len(indices) % global_batch_size, _PADDING, dtype=np.int64)
    indices = np.concatenate([indices, padding])
    for start in range(0, len(indices), global_batch_size):
        batch = indices[start : start + global_batch_size]
        share = _share(batch, dp_rank, sizes)
        yield _micro_batches(dataset, share, sizes[dp_rank])


def _share(global_batch: Int64Array, dp_rank: int, sizes: Sequence[int]) -> Int64Array:
    """The samples of one rank: the global batch cut into a block per rank, in proportion to
    `sizes`."""
    rounds, rest = divmod(len(global_batch), sum(sizes))
    assert not rest, "the plan's batch arithmetic"
    first = rounds * sum(sizes[:dp_rank])
    return global_batch[first : first + rounds * sizes[dp_rank]]


def _micro_batches(
    dataset: Samples, indices: Int64Array, micro_batch_size: int
) -> list[MicroBatch]:
    return [
        _micro_batch(dataset, indices[start : start + micro_batch_size])
        for start in range(0, len(indices), micro_batch_size)
    ]


def _micro_batch(dataset: Samples, indices: Int64Array) -> MicroBatch:
    rows: list[Row] = []
    for index in indices:
        if index != _PADDING:
            rows += dataset.rows(int(index))
        else:
            rows += map(Row.padding, dataset.rows(0))
    return _stack(rows, [int(index) for index in indices])


def _stack(rows: Sequence[Row], samples: Sequence[int]) -> MicroBatch:
    """The micro batch of these rows, which are those of `samples`."""
    return MicroBatch(
        _tensor([row.input_ids for row in rows]),
        _tensor([row.labels for row in rows]),
        positions=_optional([row.positions for row in rows]),
        segments=_optional([row.segments for row in rows]),
        extra={
            name: torch.tensor([row.extra[name] for row in rows], dtype=torch.float32)
            for name in rows[0].extra
        },
        samples=tuple(samples),
    )


def _tensor(arrays: Sequence[npt.NDArray[np.generic]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


def _optional(arrays: Sequence[npt.NDArray[np.generic] | None]) -> torch.Tensor | None:
    there = [array for array in arrays if array is not None]
    assert len(there) in (0, len(arrays)), "rows of one data set have one form"
    return _tensor(there) if there else None
