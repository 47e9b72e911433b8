"""Attention of rows whose positions are spread over ranks."""

import pytest

from tests.forked import call_ranks
from tests.models.context_worker import CASES, EXCHANGES, WORLD, compare


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
    wrong = {n: error for n, error in found.items() if error > (1e-12 if n in CASES else 1e-5)}
    assert not wrong
