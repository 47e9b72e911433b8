"""Attention of rows whose positions are spread over ranks."""

import pytest
import torch

from tests.forked import call_ranks
from tests.models.context_worker import CASES, EXCHANGES, FAULTS, SEGMENTS, WORLD, compare
from toolkit.batch import MicroBatch
from toolkit.models.context.runs import bounds, natural, own, run_ends, shares


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """The largest of all ranks."""
    of_ranks = call_ranks(compare, WORLD)
    return {name: max(one[name] for one in of_ranks) for name in of_ranks[0]}


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_exchange_computes_what_whole_rows_do(
    exchange: str, degree: int, errors: dict[str, float]
) -> None:
    named = f"{exchange} cp{degree}: "
    mine = [name for name in errors if name.startswith(named)]
    found = {name.removeprefix(named): errors[name] for name in mine}
    assert found.keys() >= CASES.keys()
    limits = dict.fromkeys(CASES, 1e-12)
    limits |= {name: 0.0 for name in found if "leaks" in name}
    wrong = {name: error for name, error in found.items() if error > limits.get(name, 1e-5)}
    assert not wrong


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_planted_fault_is_noticed(
    exchange: str, fault: str, errors: dict[str, float]
) -> None:
    assert errors[f"{exchange} cp2 with {fault}"] > 1e-2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_sees_the_document_up_to_its_end(ranks: int) -> None:
    """Against counting the positions one by one."""
    length, flat = SEGMENTS.shape[1], SEGMENTS.flatten().tolist()
    ends = MicroBatch(SEGMENTS, SEGMENTS, segments=SEGMENTS).ends
    assert ends is not None
    for rank in range(ranks):
        for first, end in bounds(length, rank, ranks):
            mine = [p for p in range(len(flat)) if first <= p % length < end]
            sees = {
                p: [k for k in range(p // length * length, p + 1) if flat[k] == flat[p]]
                for p in mine
            }
            queries, keys = (x.tolist() for x in run_ends(ends, length, first, end))
            assert len(queries) == len(keys)
            found = {}
            for number in range(len(queries) - 1):
                count = queries[number + 1] - queries[number]
                for back, query in enumerate(
                    range(queries[number + 1] - 1, queries[number] - 1, -1)
                ):
                    last = keys[number + 1] - back
                    found[mine[query]] = [*range(keys[number], last)]
                assert count <= keys[number + 1] - keys[number]
            assert found == sees


def test_parts_make_a_whole() -> None:
    rows = torch.arange(2 * 16 * 3).view(2, 16, 3)
    parts = shares(rows, 4)
    assert torch.equal(natural(parts), rows)
    assert torch.equal(parts[1], own(rows, 1, 4))
    assert own(rows, 1, 4)[0, :, 0].tolist() == [6, 9, 36, 39]
