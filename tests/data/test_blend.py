"""Several sources as one data set: every sample once, in every layout, through every stage."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.building import built
from toolkit.batch import IGNORE_INDEX
from toolkit.data.blend import BlendOrder, Stage, exact
from toolkit.data.build import TrainingData
from toolkit.data.interleave import Interleaving

BYTES = {"a": 400, "b": 200, "c": 100}
"""Characters of each source's only document."""


def blended(sizes: list[int], *stages: tuple[int, list[float]], seed: int = 3) -> BlendOrder:
    mixed = [Stage(first, Interleaving([*map(exact, weights)])) for first, weights in stages]
    return BlendOrder(seed, sizes, mixed)


def test_every_sample_of_a_source_once_before_any_comes_again() -> None:
    sizes, weights = [60, 30, 10], [0.6, 0.3, 0.1]
    order = blended(sizes, (0, weights))
    for epoch in range(3):
        assert sorted(order.indices(100 * epoch, 100).tolist()) == [*range(100)]
    first, second = order.indices(0, 100), order.indices(100, 100)
    assert first.tolist() != second.tolist()
    # Sources of the same size have orders of their own.
    same = blended([50, 50], (0, [1.0, 1.0])).indices(0, 100)
    assert same[same < 50].tolist() != (same[same >= 50] - 50).tolist()


def test_a_change_of_weights_continues_every_source() -> None:
    sizes = [1000, 1000, 1000]
    stages = (0, [0.8, 0.2, 0.0]), (100, [0.1, 0.4, 0.5]), (300, [0.0, 0.0, 1.0])
    order = blended(sizes, *stages)
    seen = order.indices(0, 500)
    assert len(set(seen.tolist())) == 500
    sources = seen // 1000
    found = [Counter(sources[a:b].tolist()) for a, b in ((0, 100), (100, 300), (300, 500))]
    assert found == [{0: 80, 1: 20}, {0: 20, 1: 80, 2: 100}, {2: 200}]
    assert order.counts(500).tolist() == [100, 100, 300]
    for number in range(3):  # each in the order that it has alone
        alone = blended(sizes, (0, [float(number == one) for one in range(3)]))
        mine = seen[sources == number]
        assert mine.tolist() == alone.indices(0, len(mine)).tolist()


@given(st.integers(0, 10**6), st.integers(1, 64), st.integers(0, 2**40))
def test_any_part_of_the_order_is_the_same(position: int, count: int, seed: int) -> None:
    stages = (0, [0.7, 0.2, 0.1]), (500, [0.2, 0.2, 0.6]), (10**5, [0.0, 1.0, 1.0])
    order = blended([70, 33, 5], *stages, seed=seed)
    whole = order.indices(position, count)
    parts = [order.indices(position + n, 1) for n in range(count)]
    assert whole.tolist() == np.concatenate(parts).tolist()


def build(folder: Path, **data: Any) -> TrainingData:
    for name, size in BYTES.items():
        (folder / f"{name}.txt").write_text(name * size)
    sources = [
        {"kind": "text", "files": [f"{name}.txt"], "label": name, "weight": weight}
        for name, weight in zip(BYTES, (0.5, 0.3, 0.2), strict=True)
    ]
    return built(folder, {"train": sources, **data}, 4, 8)


def letters(data: TrainingData, start: int, count: int) -> Counter[str]:
    samples = data.order.indices(start, count).tolist()
    rows = [row for index in samples for row in data.train.rows(index)]
    return Counter(chr(row.input_ids[0]) for row in rows)


def test_a_recipe_with_three_sources(tmp_path: Path) -> None:
    stages = [{"from_step": 5, "weights": {"a": 0, "b": 1, "c": 1}}]
    data = build(tmp_path, stages=stages)
    assert [len(source.train) for source in data.sources] == [100, 50, 25]
    assert letters(data, 0, 40) == {"a": 20, "b": 12, "c": 8}
    assert letters(data, 40, 40) == {"b": 20, "c": 20}


def test_epochs_of_each_source(tmp_path: Path) -> None:
    sources = [
        {"kind": "text", "files": ["b.txt"], "epochs": 1},
        {"kind": "text", "files": ["c.txt"], "epochs": 4},
    ]
    data = build(tmp_path, train=sources)
    assert data.samples_per_epoch == 50 + 4 * 25
    assert "`c.txt` is seen 32.0 times in this run" in [*data.notes(150)][1]
    assert letters(data, 0, data.samples_per_epoch) == {"b": 50, "c": 100}
    found = Counter(data.order.indices(0, data.samples_per_epoch).tolist())
    assert [found[n] for n in range(75)] == [1] * 50 + [4] * 25


def test_what_is_still_to_come_may_change(tmp_path: Path) -> None:
    """A checkpoint after 40 samples continues with a new stage behind them, not before."""
    plain = build(tmp_path)
    later = [{"from_step": 5, "weights": {"a": 0, "b": 1, "c": 1}}]
    changed = build(tmp_path, stages=later)
    assert plain.fingerprint_at(40) == changed.fingerprint_at(40)
    assert plain.fingerprint_at(41) != changed.fingerprint_at(41)
    weights = build(tmp_path, stages=[{**later[0], "weights": {"a": 1, "b": 1, "c": 1}}])
    assert weights.fingerprint_at(41) != changed.fingerprint_at(41)


def test_validation_of_each_source(tmp_path: Path) -> None:
    for name in "xyz":
        (tmp_path / f"{name}.txt").write_text(name * 40)
    validation = [{"kind": "text", "files": [f"{name}.txt"]} for name in "xyz"]
    data = build(tmp_path, validation=validation)
    assert [*data.validation] == ["x.txt", "y.txt", "z.txt"]
    for name, samples in data.validation.items():
        (row,) = samples.rows(0)
        assert bytes(row.input_ids.tolist()).decode() == name[0] * 4


@pytest.mark.parametrize("kind", ["chat", "preference"])
def test_conversations_and_preferences(tmp_path: Path, kind: str) -> None:
    """Three rows of one data set to one of the other, each of its own column format."""
    for name in "yz":
        rows = [
            {"prompt": name, "completion": name * n}
            if kind == "chat"
            else {"prompt": name, "chosen": name * n, "rejected": name}
            for n in range(2, 12)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"kind": kind, "path": "y.jsonl", "weight": 3},
        {"kind": kind, "path": "z.jsonl", "weight": 1},
    ]
    data = build(tmp_path, train=sources, chat_template="chatml", validation_fraction=0.2)
    assert [*data.validation] == ["y.jsonl", "z.jsonl"]
    assert [len(source.train) for source in data.sources] == [8, 8]
    found: Counter[str] = Counter()
    for index in data.order.indices(0, 16).tolist():
        rows_found = data.train.rows(index)
        assert len(rows_found) == data.train.rows_per_sample == (1 if kind == "chat" else 2)
        trained = rows_found[0].labels[rows_found[0].labels != IGNORE_INDEX]
        found.update({"y": int(ord("y") in trained), "z": int(ord("z") in trained)})
    assert found == {"y": 12, "z": 4}
