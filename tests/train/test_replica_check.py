"""Replicas that differ in one bit are found and named; parts of a model are not replicas."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.cases import (
    MIXTRAL,
    Case,
    first_batch,
    megatron,
    new_engine,
)
from tests.forked import run_ranks
from toolkit.engines.distributed import Ranks, join, leave
from toolkit.errors import DmtError
from toolkit.train import replica_check
from toolkit.train.replica_check import ReplicaCheck, digest, odd_ranks, set_aside_after


def compare(case: Case, ranks: Ranks, flipped: int) -> dict[str, Any]:
    """What the check says of equal replicas, and which error it raises for unequal ones."""
    engine, layout = new_engine(case, ranks)
    batches, count = first_batch(ranks, layout)
    engine.train_step(batches, count, 1e-3)
    check = ReplicaCheck(engine, layout, agreed_step=0, distrust=str)
    said = [check.check(1), check.check(2)]
    if ranks.rank == flipped and (weights := list(engine.replicated_weights())):
        _, weight = weights[-1]
        weight.data.view(-1).view(torch.int32)[-1] ^= 1
    try:
        check.check(3)
        error = None
    except DmtError as found:
        error = f"{type(found).__name__}: {found}"
    engine.close()
    return {"said": said, "error": error}


def compare_all(cases: Sequence[Case], flipped: int) -> list[dict[str, Any]]:
    """What `compare` finds on this rank for each case; a bit flips on rank `flipped`."""
    ranks = join()
    found = [compare(case, ranks, flipped) for case in cases]
    leave()
    return found


HOST = socket.gethostname()


def test_the_odd_one_of_three_is_named() -> None:
    assert odd_ranks((0, 0, 0), (1, 1, 9)) == ([2], True)


def test_of_two_nobody_knows_which_is_right() -> None:
    assert odd_ranks((0, 1, 0, 1), (1, 5, 3, 5)) == ([0, 2], False)


def test_other_parts_of_the_model_are_not_compared() -> None:
    assert odd_ranks((0, 1, 0, 1), (1, 3, 1, 3)) == ([], True)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.integers(0, 20 * 7 - 1),
    st.data(),
)
def test_every_bit_counts(dtype: torch.dtype, place: int, data: st.DataObject) -> None:
    weight = torch.randn(20, 7, generator=torch.Generator().manual_seed(1)).to(dtype)
    integer = replica_check.BITS[weight.element_size()]
    bit = data.draw(st.integers(0, 8 * weight.element_size() - 1))
    other = weight.clone()
    flat = other.view(-1).view(integer)
    flat[place] ^= torch.tensor(1, dtype=torch.int64).bitwise_left_shift(bit).to(integer)
    assert not torch.equal(other.view(integer), weight.view(integer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_check, "CHUNK", 64)
        assert int(digest(other)) != int(digest(weight))


def test_order_counts() -> None:
    """Shards that were gathered in the wrong order have the same sum."""
    weight = torch.arange(6.0)
    assert int(digest(weight)) != int(digest(weight[[3, 4, 5, 0, 1, 2]]))
    assert int(digest(weight)) == int(digest(weight.clone()))
    assert int(digest(weight.view(2, 3).t())) == int(digest(weight.view(2, 3).t().contiguous()))


def test_checkpoints_since_the_last_agreement_are_set_aside(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        (tmp_path / f"step-{step:08}").mkdir()
    (tmp_path / "step-00000008.suspect").mkdir()
    assert set_aside_after(tmp_path, 4) == (
        "step-00000008, step-00000012 got the ending .suspect: saved since then; "
        "start the same command again"
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-00000004",
        "step-00000008.suspect",
        "step-00000008.suspect1",
        "step-00000012.suspect",
    }
    assert set_aside_after(tmp_path, 4) == "start the same command again"
    assert "no checkpoint is left" in set_aside_after(tmp_path, 3)
    assert set_aside_after(tmp_path, 0) == "start the same command again"


@pytest.mark.slow
def test_four_ranks() -> None:
    cases = [
        Case("ddp", 2),
        megatron(tensor=2, expert=2, family=MIXTRAL),
        megatron(tensor=2, pipeline=2),
        Case("deepspeed", 2, stage=3),
    ]
    by_rank = run_ranks(compare_all, 4, cases, 3)
    for results in by_rank:
        assert [r["said"] for r in results[:2]] == [[None, None]] * 2
        for result in results[2:]:
            assert "own part of the model" in result["said"][0]
            assert result["said"][1] is result["error"] is None, "said once"
    for results in by_rank[1:]:
        assert {r["error"] for r in results[:2]} == {"PeerFailed: another rank failed"}

    errors = [result["error"] for result in by_rank[0][:2]]
    most = f"rank 3 ({HOST}): other weights than most replicas"
    pair = f"rank 1 ({HOST}), rank 3 ({HOST}): weights differ between them"
    for error, who in zip(errors, (most, pair), strict=True):
        assert error.startswith(f"RunFailed: step 3: {who}")
        assert "last equal at step 2" in error
