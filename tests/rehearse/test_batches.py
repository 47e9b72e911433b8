"""The batches are the same for every layout, and uneven in every way."""

import pytest
import torch

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.layout import Layout
from toolkit.recipe.schema import TrainingSection
from toolkit.rehearse.batches import document_starts, global_batch, isolated, micro_batches

TRAINING = TrainingSection(steps=3, sequence_length=16, global_batch_size=8)


def test_masks_are_uneven() -> None:
    """Parity means nothing without this: a mean of means would pass."""
    _, labels = global_batch(TRAINING, 101, 0)
    kept = (labels != IGNORE_INDEX).sum(dim=1)
    assert kept[0] == 16
    assert kept[-2:].tolist() == [0, 0]
    assert kept[:4].sum() > 2 * kept[4:].sum()
    for rows in (2, 1):
        assert len({int(part.sum()) for part in kept.split(rows)}) >= 4


@pytest.mark.parametrize("layout", [Layout(dp=2, micro_batch=2), Layout(micro_batch=2),
                                    Layout(dp=4, micro_batch=1)])  # fmt: skip
def test_shares_of_all_ranks_are_the_batch(layout: Layout) -> None:
    inputs, labels = global_batch(TRAINING, 101, 0)
    whole = isolated(MicroBatch(inputs, labels), document_starts(TRAINING, 0))
    shares = [
        batch for rank in range(layout.dp) for batch in micro_batches(whole, layout, rank)
    ]
    assert all(len(batch.input_ids) == layout.micro_batch for batch in shares)
    assert torch.equal(torch.cat([batch.input_ids for batch in shares]), inputs)
    assert torch.equal(torch.cat([batch.labels for batch in shares]), labels)
    for name in ("segments", "positions"):
        found = torch.cat([getattr(batch, name) for batch in shares])
        assert torch.equal(found, getattr(whole, name))


def test_isolated_documents_count_from_zero() -> None:
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    batch = isolated(MicroBatch(tokens, tokens), [[0], [0, 1, 3]])
    assert batch.segments is not None
    assert batch.positions is not None
    assert batch.segments.tolist() == [[0, 0, 0, 0], [0, 1, 1, 2]]
    assert batch.positions.tolist() == [[0, 1, 2, 3], [0, 0, 1, 0]]
    starts = document_starts(TRAINING, 0)
    assert [len(row) for row in starts] == [1, 2, 3, 4] * 2
    assert starts != document_starts(TRAINING, 1)
