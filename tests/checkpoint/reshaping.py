"""Checkpoints of several layouts, each continued in others: the same state, the same run."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.checkpoint.reshape_worker import SAVED_AT, load_all, save_all
from tests.engines.cases import OFFLOAD_TOLERANCE, TOLERANCE, assert_curves
from tests.engines.parity_worker import global_batches, loss_of
from tests.forked import run_ranks
from toolkit.checkpoint.export import export
from toolkit.checkpoint.store import folder_name


def write_all(folder: Path, layouts: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint of every layout; how each went on unbroken."""
    unbroken = {}
    for world, cases in by_ranks(layouts):
        unbroken |= run_ranks(save_all, world, folder, cases)[0]
    return unbroken


def check(folder: Path, unbroken: Any, layouts: Any, pairs: list[tuple[str, str]]) -> None:
    """Continue the first layout of each pair in the second."""
    for world, cases in by_ranks({target: layouts[target] for _, target in pairs}):
        for (source, target), result in run_ranks(load_all, world, folder, cases, pairs)[
            0
        ].items():
            name = f"{source} in {target}"
            assert result["different"] == [], name
            tolerance = OFFLOAD_TOLERANCE if "offload" in name else TOLERANCE
            wanted = unbroken[source]
            assert_curves(result, wanted, tolerance=tolerance, name=name)
            if source == target:
                assert all(result[quantity] == wanted[quantity] for quantity in wanted), (
                    f"{name}: not bitwise the same"
                )


def check_exports(folder: Path, unbroken: Any, layouts: Any) -> None:
    """transformers alone has the loss of the next step by each checkpoint's export."""
    *_, (inputs, labels) = global_batches(SAVED_AT + 1)
    for name in layouts:
        export(folder / name / folder_name(SAVED_AT), folder / f"{name} exported")
        model = AutoModelForCausalLM.from_pretrained(folder / f"{name} exported")
        wanted = pytest.approx(unbroken[name]["loss"][0], rel=TOLERANCE)
        assert loss_of(model, inputs, labels) == wanted, name


def by_ranks(layouts: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each number of ranks with the cases of the layouts that have so many."""
    for world in sorted({world for world, _ in layouts.values()}):
        yield world, {name: case for name, (ranks, case) in layouts.items() if ranks == world}


def around(layouts: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs in which every layout is left once and entered once."""
    names = random.Random(5).sample(list(layouts), len(layouts))
    return list(zip(names, [*names[1:], names[0]], strict=True))
