"""Checkpoints of several layouts, each continued in others: the same state, the same run."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.reshape_worker import load_all, save_all
from tests.engines.cases import OFFLOAD_TOLERANCE, TOLERANCE
from tests.forked import run_ranks


def write_all(folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of every layout; how each went on unbroken."""
    unbroken = {}
    for world in (1, 2, 4):
        cases = {name: case for name, (ranks, case) in layouts.items() if ranks == world}
        if cases:
            unbroken |= run_ranks(save_all, world, folder, cases)[0]
    return unbroken


def check(folder: Path, unbroken: Any, layouts: Any, pairs: list[tuple[str, str]]) -> None:
    """Continue the first layout of each pair in the second."""
    # Other processes for each target: the groups of every engine have threads that stay.
    for target, (world, case) in layouts.items():
        sources = [source for source, wanted in pairs if wanted == target]
        results = (
            run_ranks(load_all, world, folder, target, case, sources)[0] if sources else {}
        )
        for source, result in results.items():
            name = f"{source} in {target}"
            assert result["different"] == [], name
            tolerance = OFFLOAD_TOLERANCE if "offload" in name else TOLERANCE
            for quantity in ("loss", "grad_norm"):
                wanted = unbroken[source][quantity]
                assert result[quantity] == pytest.approx(wanted, rel=tolerance), name
                if source == target:
                    assert result[quantity] == wanted, f"{name}: not bitwise the same"


def around(layouts: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs in which every layout is left once and entered once."""
    names = random.Random(5).sample(list(layouts), len(layouts))
    return list(zip(names, [*names[1:], names[0]], strict=True))
