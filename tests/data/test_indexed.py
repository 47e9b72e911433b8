"""Megatron's indexed format, against megatron-core's own reader and writer."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from toolkit.data.indexed import bin_path, idx_path, read_indexed, token_dtype, write_chunks

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 65535], [7] * 1000]


def write(prefix: Path, dtype: type[np.integer] = np.uint16) -> None:
    first, *others = DOCUMENTS
    pieces = [(first[:2], []), (first[2:], [3])]
    write_chunks(prefix, dtype, [*pieces, *((one, [len(one)]) for one in others)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Transformer Engine and Apex are not installed.*")
@pytest.mark.filterwarnings("ignore:The following imports from .dynamic_context.py.")
@pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_megatron_core_reads_ours_and_we_read_theirs(
    tmp_path: Path, dtype: type[np.integer]
) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    write(tmp_path / "ours", dtype)
    theirs = IndexedDataset(str(tmp_path / "ours"))
    assert theirs.index.dtype is dtype
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]

    builder = IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=dtype)
    builder.add_item(torch.tensor([1, 2]))  # two sequences, one document
    builder.add_item(torch.tensor([3]))
    builder.end_document()
    builder.add_document(np.array([4, 5, 6, 7]), [3, 1])
    builder.add_item(torch.tensor([8]))  # after the last document mark
    builder.finalize(str(idx_path(tmp_path / "theirs")))
    ours = read_indexed(tmp_path / "theirs")
    assert ours.tokens.dtype == dtype
    assert ours.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ours.document_starts(np.arange(4)).tolist() == [0, 3, 7, 8]


def test_round_trip(tmp_path: Path) -> None:
    write(tmp_path / "data")
    read = read_indexed(tmp_path / "data")
    starts = read.document_starts(np.arange(5))
    assert [read.tokens[a:b].tolist() for a, b in pairwise(starts)] == DOCUMENTS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]


def test_the_type_follows_the_vocabulary() -> None:
    assert [token_dtype(n) for n in (257, 65536, 65537)] == [np.uint16, np.uint16, np.int32]


def test_of_an_unfinished_pair_nothing_is_left(tmp_path: Path) -> None:
    def chunks() -> Iterator[tuple[list[int], list[int]]]:
        yield [1], [1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_chunks(tmp_path / "data", np.uint16, chunks())
    assert list(tmp_path.iterdir()) == []
