"""Which rank takes which data, and which stage holds which layers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.layout import Layout, padded_vocab, stage_layers

DEGREES = st.integers(1, 5)


def test_data_ranks_by_hand() -> None:
    """megatron-core's default order tp-cp-ep-dp-pp: neighbours share a tensor group."""
    layout = Layout(dp=2, tp=2, pp=2)
    assert [layout.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [Layout(dp=4).data_rank(rank) for rank in range(4)] == [0, 1, 2, 3]


@given(DEGREES, DEGREES, DEGREES, DEGREES)
def test_every_data_rank_is_taken_by_a_whole_model(dp: int, tp: int, pp: int, cp: int) -> None:
    layout = Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    ranks = [layout.data_rank(rank) for rank in range(layout.world)]
    assert sorted(ranks) == sorted(list(range(dp)) * (tp * pp * cp))
    # A tensor group is a run of neighbours that read the same samples.
    assert all(len(set(ranks[i : i + tp])) == 1 for i in range(0, layout.world, tp))


def test_model_ranks_by_hand() -> None:
    """Ranks of one number are replicas: data parallel, and not pipeline, tensor or expert."""

    def parts(layout: Layout) -> list[int]:
        return [layout.model_rank(rank) for rank in range(layout.world)]

    assert parts(Layout(dp=4)) == [0, 0, 0, 0]
    assert parts(Layout(dp=2, tp=2, pp=2)) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert parts(Layout(dp=2, cp=2)) == [0, 0, 0, 0]
    assert parts(Layout(dp=4, ep=2)) == [0, 1, 0, 1]
    # Experts are not split by tensor parallel: both groups begin at the first rank.
    assert parts(Layout(dp=4, tp=2, ep=4)) == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("vocab", "tp", "rows"), [(320, 2, 320), (257, 2, 258), (50257, 8, 50264), (3, 8, 8)]
)
def test_padded_vocabulary(vocab: int, tp: int, rows: int) -> None:
    assert padded_vocab(vocab, tp) == rows


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "chunks"),
    [
        (126, 16, 1, (7, *(8,) * 14, 7)),  # Llama 3 405B as Meta cut it
        (32, 4, 2, (4,) * 8),
        (5, 2, 1, (3, 2)),
        (5, 3, 1, (2, 2, 1)),
        (6, 2, 2, (1, 2, 2, 1)),
        (7, 1, 1, (7,)),
        (14, 4, 3, (1, 2, 2, *(1,) * 9)),
    ],
)
def test_layers_of_chunks(layers: int, pp: int, vpp: int, chunks: tuple[int, ...]) -> None:
    assert stage_layers(layers, pp, vpp) == chunks


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 60))
def test_chunks_are_even(pp: int, vpp: int, extra: int) -> None:
    layers = pp * vpp + extra
    chunks = stage_layers(layers, pp, vpp)
    assert (len(chunks), sum(chunks)) == (pp * vpp, layers)
    assert max(chunks) - min(chunks) <= 1
    assert min(chunks) >= 1
    on_ranks = [sum(chunks[rank::pp]) for rank in range(pp)]
    assert max(on_ranks) - min(on_ranks) <= 1
    if len(chunks) > 2:
        assert chunks[0] <= min(chunks[1:-1])  # it holds the embedding besides
    assert chunks[-1] == min(chunks)  # it holds the output head besides
