"""The same global batch under every layout; a cursor that continues exactly."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.batch import IGNORE_INDEX, MicroBatch
from toolkit.data.batches import GlobalBatches, evaluation_batches
from toolkit.data.order import EpochOrder
from toolkit.data.packing import StreamSamples, TokenStream
from toolkit.data.tokenized import TokenizedData
from toolkit.layout import Layout
from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.rehearse.batches import micro_batches as rehearsed

Tokenized = Callable[[Sequence[Sequence[int]]], TokenizedData]
Rows = list[tuple[list[int], list[int]]]


def rows(micro_batches: Sequence[MicroBatch]) -> Rows:
    return [
        (inputs.tolist(), labels.tolist())
        for batch in micro_batches
        for inputs, labels in zip(batch.input_ids, batch.labels, strict=True)
    ]


def of(size: int) -> BatchSizes:
    return BatchSizes.of([size], 2)


def splits(global_batch_size: int) -> list[tuple[int, int]]:
    """Every (dp_size, micro_batch_size) whose product divides the global batch."""
    return [
        (dp, micro)
        for dp in range(1, global_batch_size + 1)
        for micro in range(1, global_batch_size + 1)
        if global_batch_size % (dp * micro) == 0
    ]


@pytest.fixture
def dataset(tokenized: Tokenized) -> Callable[[int], StreamSamples]:
    def make(n_samples: int) -> StreamSamples:
        tokens = list(range(n_samples * 2 + 1))
        documents = [tokens[i : i + 5] for i in range(0, len(tokens), 5)]
        return StreamSamples(TokenStream.whole(tokenized(documents)), 2)

    return make


SETTINGS = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20
)
Make = Callable[[int], StreamSamples]


@SETTINGS
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    rounds=st.integers(1, 4),
    n_samples=st.integers(1, 60),
    consumed=st.integers(0, 500),
)
def test_every_layout_gets_the_same_global_batch(
    dataset: Make, sizes: list[int], rounds: int, n_samples: int, consumed: int
) -> None:
    layout = Layout(
        dp=len(sizes),
        micro_batch=max(sizes),
        gradient_accumulation=rounds,
        shares=tuple(sizes),
    )
    size = layout.global_batch
    data = dataset(n_samples)
    batches = GlobalBatches(data, EpochOrder(7, n_samples), of(size))
    found = [
        batches.micro_batches(consumed, rank, layout.micro_batches) for rank in range(layout.dp)
    ]
    whole = batches.micro_batches(consumed, 0, [size])
    assert [row for share in found for row in rows(share)] == rows(whole)
    assert [[len(batch.labels) for batch in share] for share in found] == [
        [one] * rounds for one in sizes
    ]
    (together,) = whole
    of_rehearsals = [rehearsed(together, layout, rank) for rank in range(layout.dp)]
    assert [*map(rows, of_rehearsals)] == [*map(rows, found)]


@SETTINGS
@given(n_samples=st.integers(1, 40), size=st.integers(1, 12), steps=st.integers(1, 6))
def test_epochs_follow_without_a_seam(
    dataset: Make, n_samples: int, size: int, steps: int
) -> None:
    """Continuing from a cursor is the same as never having stopped, and nothing is lost."""
    data, order = dataset(n_samples), EpochOrder(5, n_samples)
    seen = [
        row
        for step in range(steps)  # a fresh object per step: there is no state but the cursor
        for row in rows(GlobalBatches(data, order, of(size)).micro_batches(step * size, 0, [1]))
    ]
    assert seen == rows(GlobalBatches(data, order, of(steps * size)).micro_batches(0, 0, [1]))
    for start in range(0, len(seen) - n_samples + 1, n_samples):
        epoch = {tuple(inputs) for inputs, _ in seen[start : start + n_samples]}
        assert len(epoch) == n_samples


@SETTINGS
@given(n_samples=st.integers(1, 30), size=st.integers(1, 12), n_batches=st.integers(1, 4))
def test_evaluation_sees_each_sample_once_under_every_layout(
    dataset: Make, n_samples: int, size: int, n_batches: int
) -> None:
    data = dataset(n_samples)
    n_expected = min(n_samples, n_batches * size)
    expected = sorted(
        (row.input_ids.tolist(), row.labels.tolist())
        for index in range(n_expected)
        for row in data.rows(index)
    )
    for dp, micro in splits(size):
        shares = [evaluation_batches(data, size, n_batches, r, [micro] * dp) for r in range(dp)]
        assert len({len(share) for share in shares}) == 1
        assert len(shares[0]) % (size // (dp * micro)) == 0  # whole global batches
        all_rows = [row for share in shares for row in rows(share)]
        padding = [row for row in all_rows if set(row[1]) == {IGNORE_INDEX}]
        real = sorted(row for row in all_rows if set(row[1]) != {IGNORE_INDEX})
        assert real == expected
        assert len(padding) == -n_expected % size
