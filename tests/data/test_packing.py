"""Samples, labels and document boundaries, against a straightforward reference."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.batch import IGNORE_INDEX
from toolkit.data.indexed import read_indexed, write_indexed
from toolkit.data.order import held_out_documents
from toolkit.data.packing import RowParts, StreamSamples, TokenStream, pack, packed_rows
from toolkit.data.tokenized import TokenizedData
from toolkit.errors import DataError

Tokenized = Callable[[Sequence[Sequence[int]]], TokenizedData]

DOCUMENTS = st.lists(st.lists(st.integers(0, 60000), min_size=1, max_size=9), min_size=1)
GOLDEN_HELD_OUT = [4, 5, 13, 18]


def reference_samples(
    documents: Sequence[Sequence[int]], length: int
) -> list[tuple[list[int], list[int]]]:
    tokens = [token for document in documents for token in document]
    last = [i == len(d) - 1 for d in documents for i in range(len(d))]
    samples = []
    for start in range(0, len(tokens) - length, length):
        labels = [
            IGNORE_INDEX if last[i] else tokens[i + 1] for i in range(start, start + length)
        ]
        samples.append((tokens[start : start + length], labels))
    return samples


def all_samples(stream: TokenStream, length: int) -> list[tuple[list[int], list[int]]]:
    dataset = StreamSamples(stream, length)
    rows = [row for i in range(len(dataset)) for row in dataset.rows(i)]
    return [(row.input_ids.tolist(), row.labels.tolist()) for row in rows]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(documents=DOCUMENTS, length=st.integers(1, 12))
def test_any_documents_are_isolated(
    tokenized: Tokenized, documents: list[list[int]], length: int
) -> None:
    """Two neighbours have one segment where they are of one document, however rows are cut."""
    owners = [number for number, document in enumerate(documents) for _ in document]
    dataset = StreamSamples(TokenStream.whole(tokenized(documents)), length, isolates=True)
    for index in range(len(dataset)):
        (row,) = dataset.rows(index)
        assert row.segments is not None and row.positions is not None
        here = owners[index * length : (index + 1) * length]
        assert row.segments.tolist() == [sorted(set(here)).index(owner) for owner in here]
        starts = [here.index(owner) for owner in here]
        assert row.positions.tolist() == [place - start for place, start in enumerate(starts)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    documents=st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=9),
        min_size=2,
    )
)
def test_only_trained_tokens_are_labels(
    tmp_path: Path, documents: list[list[tuple[int, bool]]]
) -> None:
    """Of rows of one document, and of rows of as many as fit."""
    write_indexed(
        tmp_path / "given",
        np.int32,
        [[token if trained else -1 - token for token, trained in one] for one in documents],
    )
    numbers = np.arange(len(documents))
    data = TokenizedData(read_indexed(tmp_path / "given"), "", "given", numbers)
    stream = TokenStream.whole(data)
    apart = StreamSamples(stream, 9, RowParts.documents(stream), rows_per_sample=2)
    assert len(apart) == len(documents) // 2
    write_indexed(tmp_path / "rows", np.int64, packed_rows(stream, 9))
    packed = RowParts.stored(read_indexed(tmp_path / "rows"))
    joined = pack(np.array([len(one) for one in documents]), 9)
    assert packed.n_rows == len(joined)
    rows = [row for index in range(len(apart)) for row in apart.rows(index)]
    expected = [[document] for document in documents[: len(rows)]]
    rows += [StreamSamples(stream, 9, packed).rows(index)[0] for index in range(len(joined))]
    expected += [[documents[number] for number in row] for row in joined]
    for row, held in zip(rows, expected, strict=True):
        tokens = [token for one in held for token, _ in one]
        labels = [
            label
            for one in held
            for label in [*(t if trained else IGNORE_INDEX for t, trained in one[1:]), -100]
        ]
        padding = 9 - len(tokens)
        assert row.input_ids.tolist() == tokens + [0] * padding
        assert row.labels.tolist() == labels + [IGNORE_INDEX] * padding


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(documents=DOCUMENTS, length=st.integers(1, 12), data=st.data())
def test_any_choice_of_documents(
    tokenized: Tokenized, documents: list[list[int]], length: int, data: st.DataObject
) -> None:
    indexed = tokenized(documents)
    out = sorted(data.draw(st.sets(st.sampled_from(range(len(documents))))))
    chosen = np.array(out, dtype=np.int64)
    kept = [document for i, document in enumerate(documents) if i not in out]
    streams = [
        (TokenStream.whole(indexed), documents),
        (TokenStream.only(indexed, chosen), [documents[i] for i in out]),
        (TokenStream.without(indexed, chosen), kept),
    ]
    for stream, expected in streams:
        assert len(stream) == sum(map(len, expected))
        assert stream.n_documents == len(expected)
        assert all_samples(stream, length) == reference_samples(expected, length)


def test_no_sample_beyond_the_end(tokenized: Tokenized) -> None:
    dataset = StreamSamples(TokenStream.whole(tokenized([[1, 2, 3]])), 3)
    assert len(dataset) == 0  # three inputs need a fourth token as label
    with pytest.raises(IndexError):
        dataset.rows(0)


@pytest.mark.parametrize(("token", "found"), [(300, "1 to 300"), (-5, "-5 to 3")])
def test_token_outside_the_model_is_an_error(tmp_path: Path, token: int, found: str) -> None:
    write_indexed(tmp_path / "foreign", np.int32, [[1, token, 3]])
    data = TokenizedData(read_indexed(tmp_path / "foreign"), "", "foreign")
    dataset = StreamSamples(TokenStream.whole(data), 2, vocab_size=257)
    with pytest.raises(DataError, match=rf"token ids from {found}; the model has 257"):
        dataset.rows(0)


@given(
    n_documents=st.integers(2, 500),
    fraction=st.floats(0.001, 0.999),
    seed=st.integers(0, 2**40),
)
def test_split_holds_out_the_fraction_and_leaves_both_sides_something(
    n_documents: int, fraction: float, seed: int
) -> None:
    held_out = held_out_documents(n_documents, fraction, seed)
    assert np.array_equal(held_out, np.unique(held_out))
    assert held_out[0] >= 0
    assert held_out[-1] < n_documents
    assert 1 <= len(held_out) < n_documents
    assert abs(len(held_out) - fraction * n_documents) <= 1


def test_split_is_fixed_by_the_seed() -> None:
    assert held_out_documents(20, 0.2, 1234).tolist() == GOLDEN_HELD_OUT
    assert held_out_documents(20, 0.2, 1235).tolist() != GOLDEN_HELD_OUT


@given(
    st.integers(1, 60).flatmap(
        lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity)))
    )
)
def test_every_sample_is_in_one_row_and_no_row_is_too_long(case: tuple[int, list[int]]) -> None:
    capacity, given_lengths = case
    lengths = np.array(given_lengths, dtype=np.int64)
    rows = pack(lengths, capacity)
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(lengths[row].sum() <= capacity for row in rows)
    # No two rows would fit into one.
    filled = sorted(int(lengths[row].sum()) for row in rows)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity
    assert rows == sorted(rows) == pack(lengths, capacity)


def test_skewed_lengths_fill_their_rows_in_seconds() -> None:
    """97% of the positions, in 10 s on one core."""
    capacity = 4096
    drawn = np.random.default_rng(1).lognormal(mean=5.5, sigma=1.2, size=100_000)
    lengths = np.clip(drawn, 8, capacity).astype(np.int64)
    start = time.process_time()
    rows = pack(lengths, capacity)
    assert time.process_time() - start < 10
    assert lengths.sum() / (len(rows) * capacity) > 0.97
