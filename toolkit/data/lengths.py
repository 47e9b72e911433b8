"""Samples of shorter stages: parts of the blocks that `SequenceLengths` counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.data.order import Order
from toolkit.data.rows import Int64Array, Row, Samples
from toolkit.recipe.lengths import SequenceLengths


class CutSamples:
    """Every sample of a data set cut into equal parts, numbered one after the other.

    Of a data set of packed documents they are, but for the end of the data, the samples that
    it has when it is packed at the shorter length.
    """

    def __init__(self, whole: Samples, parts: int) -> None:
        """`whole` has documents laid end to end, one row a sample."""
        self.whole, self.parts = whole, parts
        self.sequence_length = whole.sequence_length // parts
        self.rows_per_sample = whole.rows_per_sample
        self._read: tuple[int, Sequence[Row]] = (-1, ())
        """The sample of `whole` that was read last: the next part is usually of the same."""

    def __len__(self) -> int:
        return len(self.whole) * self.parts

    def rows(self, index: int) -> Sequence[Row]:
        block, part = divmod(index, self.parts)
        number, rows = self._read
        if number != block:
            rows = self.whole.rows(block)
            self._read = block, rows
        start = part * self.sequence_length
        return [row.cut(start, start + self.sequence_length) for row in rows]


def cut(samples: Samples, parts: int) -> Samples:
    """The samples, cut into so many parts each."""
    return samples if parts == 1 else CutSamples(samples, parts)


@dataclass(frozen=True)
class CutOrder:
    """The order of samples if stages have different lengths: at each place, a sample of the
    data set cut to the length of that place's stage."""

    blocks: Order
    lengths: SequenceLengths

    def indices(self, position: int, count: int) -> Int64Array:
        stages = self.lengths.stages
        ends = [stage.first_sample for stage in stages[1:]] + [position + count]
        found = []
        for stage, end in zip(stages, ends, strict=True):
            first = stage.first_sample
            places = np.arange(max(position, first), min(position + count, end)) - first
            if len(places):
                blocks, parts = np.divmod(places, stage.parts)
                begin, behind = int(blocks[0]), int(blocks[-1]) + 1
                ordered = self.blocks.indices(stage.first_block + begin, behind - begin)
                found.append(ordered[blocks - begin] * stage.parts + parts)
        return np.concatenate(found)
