"""Attention inside documents that share a row, without a mask."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from toolkit.batch import MicroBatch
from toolkit.models import documents

ENDS = torch.tensor([0, 1, 9, 24, 32, 32, 32], dtype=torch.int32)
"""Of two rows of 16 tokens; a document of the first ends in the second."""


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    _: Tensor,
    longest: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What CUDA's kernel computes, in plain products: it takes one size of heads only."""
    (_, _, scale, (left, right), grouped, *_) = rest
    assert query.shape[-1] == value.shape[-1] == key.shape[-1] == 8
    assert right == 0 and longest == 16
    assert grouped or key.shape[1] == query.shape[1]
    times = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
    place = torch.arange(len(query))
    document = torch.searchsorted(begins, place.int(), right=True)
    distance = place[:, None] - place
    seen = (document[:, None] == document) & (distance >= 0)
    if left >= 0:
        seen &= distance <= left
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    found = torch.einsum("hqk,khd->qhd", weights, value)
    return found, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("size", [(8, 8), (8, 5), (6, 3)])
def test_the_kernel_is_called_for_what_one_document_after_the_other_computes(
    window: int | None, scale: float | None, size: tuple[int, int]
) -> None:
    varlen._varlen_attn.register_kernel("cpu")(reference)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(32, heads, width, generator=generator)
        for heads, width in ((4, size[0]), (2, size[0]), (2, size[1]))
    )
    rest = (ENDS, ENDS), (16, 16), documents.Scores(scale, window)
    by_kernel, one_by_one = (
        within(q, k, v, *rest) for within in (documents._by_lengths, documents._one_by_one)
    )
    assert by_kernel.shape == (32, 4, size[1])
    torch.testing.assert_close(by_kernel, one_by_one)


def test_ends_are_those_of_the_rows_one_after_the_other() -> None:
    tokens = torch.zeros(2, 10, dtype=torch.int64)
    segments = torch.tensor([[0] * 3 + [1] * 7, [0] * 10], dtype=torch.int32)
    batch = MicroBatch(tokens, tokens, segments=segments)
    assert batch.ends is not None
    assert batch.ends.tolist() == [0, 3, 10] + [20] * 29
    second = batch.rows(1, 2).ends
    assert second is not None and second[:3].tolist() == [0, 10, 10]
    assert MicroBatch(tokens, tokens).ends is None
