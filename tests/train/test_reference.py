"""The reference's log-probabilities: computed once, kept, found again, attached to rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.fake import FakeEngine
from tests.forked import run_ranks
from toolkit.batch import IGNORE_INDEX
from toolkit.data.batches import GlobalBatches, evaluation_batches
from toolkit.data.order import EpochOrder
from toolkit.data.rows import Row
from toolkit.engines.distributed import join, leave
from toolkit.errors import RunFailed
from toolkit.layout import Layout
from toolkit.recipe.batch_sizes import BatchSizes
from toolkit.train.all_ranks import AllRanks
from toolkit.train.reference import ReferenceTable

SAMPLES = 22
LENGTH = 8
VOCABULARY = 50


class Answers:
    """Pairs of rows, of which the last tokens are trained."""

    sequence_length = LENGTH
    rows_per_sample = 2

    def __len__(self) -> int:
        return SAMPLES

    def rows(self, index: int) -> list[Row]:
        generator = np.random.default_rng(index)
        rows = []
        for _ in range(2):
            tokens = generator.integers(VOCABULARY, size=LENGTH + 1)
            labels = tokens[1:].copy()
            labels[: generator.integers(LENGTH)] = IGNORE_INDEX
            rows.append(Row(tokens[:-1], labels))
        return rows


class Killed(Exception):
    """Stands for a kill."""


class Counting(FakeEngine):
    """Logits that are not equal, and what was asked of the engine."""

    def __init__(self, last: int = 1000) -> None:
        super().__init__(VOCABULARY)
        self.logits += np.linspace(0, 3, VOCABULARY).astype(np.float32)
        self.calls, self.last = 0, last

    def sequence_log_probs(self, micro_batches: Any) -> Any:
        self.calls += 1
        if self.calls > self.last:
            raise Killed
        return super().sequence_log_probs(micro_batches)


def expected() -> list[list[float]]:
    """By numpy alone."""
    logits = np.linspace(0, 3, VOCABULARY).astype(np.float32).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum())
    data = Answers()
    return [
        [float(log_p[row.labels[row.labels != IGNORE_INDEX]].sum()) for row in data.rows(i)]
        for i in range(SAMPLES)
    ]


def compute(path: Path, layout: Layout, needed: list[int], last: int = 1000) -> dict[str, Any]:
    """Compute what is missing, in an engine that is killed after `last` global batches."""
    together = AllRanks(join(), lambda _: None)
    table = ReferenceTable(Answers(), np.array(needed, dtype=np.int64), path, together)
    missing = len(table.missing)
    engine, ticks, killed = Counting(last), [0], False
    try:
        table.compute(engine, layout, ticks.append, save_every_s=0.0)
    except Killed:
        killed = True
    read = np.load(path).tolist() if path.exists() else None
    found = {"missing": missing, "calls": engine.calls, "done": sum(ticks), "file": read}
    if not killed and len(needed) == SAMPLES:
        found |= batches(table, layout)
    leave()
    return found


def compute_unusable(path: Path) -> tuple[str, list[bool]]:
    """An engine whose log-probability of one token is not a number."""
    together = AllRanks(join(), lambda _: None)
    table = ReferenceTable(Answers(), np.arange(SAMPLES), path, together)
    engine = Counting()
    engine.logits[:] = float("nan")
    try:
        table.compute(engine, Layout(micro_batch=4), lambda _: None)
    except RunFailed as error:
        return str(error), np.isnan(np.load(path)).all(axis=1).tolist()
    finally:
        leave()
    return "", []


def batches(table: ReferenceTable, layout: Layout) -> dict[str, Any]:
    """The reference in training and in validation batches, by sample."""
    sizes = layout.micro_batches
    order = EpochOrder(3, len(table))
    four = BatchSizes.of([4], table.sequence_length)
    training = GlobalBatches(table, order, four).micro_batches(8, 0, sizes)
    validation = evaluation_batches(table, 4, 100, 0, sizes)
    both = {"training": training, "validation": validation}
    return {
        name: [
            (sample, batch.extra["reference_log_probs"][2 * place : 2 * place + 2].tolist())
            for batch in some
            for place, sample in enumerate(batch.samples)
        ]
        for name, some in both.items()
    }


ALL = list(range(SAMPLES))
LAYOUT = Layout(dp=2, micro_batch=1, gradient_accumulation=2)


def test_a_killed_computation_continues_where_it_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "reference" / "key.npy"
    first = run_ranks(compute, 2, path, LAYOUT, ALL, 2)[0]
    assert first["missing"] == SAMPLES and first["done"] == 8, "two global batches of four"
    assert np.isfinite(first["file"]).all(axis=1).tolist() == [n < 8 for n in ALL]
    assert not list(path.parent.glob("*.tmp"))

    second = run_ranks(compute, 2, path, LAYOUT, ALL)[0]
    assert (second["missing"], second["done"], second["calls"]) == (14, 14, 4)
    assert np.array(second["file"]) == pytest.approx(np.array(expected()), rel=1e-6)

    third = run_ranks(compute, 2, path, LAYOUT, ALL)[0]
    assert (third["missing"], third["calls"]) == (0, 0), "found in the cache"
    assert third["file"] == second["file"]


def test_only_samples_that_are_used_are_computed(tmp_path: Path) -> None:
    path = tmp_path / "key.npy"
    found = run_ranks(compute, 1, path, Layout(micro_batch=4), [0, 5, 21])[0]
    assert found["done"] == 3
    there = np.isfinite(found["file"]).all(axis=1)
    assert np.flatnonzero(there).tolist() == [0, 5, 21]
    # A longer run computes what it needs besides.
    more = run_ranks(compute, 1, path, Layout(micro_batch=4), ALL)[0]
    assert more["missing"] == SAMPLES - 3


def test_ranks_that_share_a_model_compute_together(tmp_path: Path) -> None:
    """And every rank reads all of it, in training and in validation batches."""
    layout = Layout(tp=2, micro_batch=2, gradient_accumulation=2)
    found = run_ranks(compute, 2, tmp_path / "key.npy", layout, ALL)[0]
    values = expected()
    assert np.array(found["file"]) == pytest.approx(np.array(values), rel=1e-6)
    assert found["training"]
    for sample, reference in found["training"]:
        assert reference == pytest.approx(values[sample], rel=1e-6)
    for sample, reference in found["validation"]:
        assert reference == pytest.approx(values[sample] if sample >= 0 else [0, 0], rel=1e-6)


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "key.npy"
    path.write_bytes(b"\x93NUMPY nothing else")
    found = run_ranks(compute, 1, path, Layout(micro_batch=4), ALL)[0]
    assert found["missing"] == SAMPLES
    assert np.isfinite(found["file"]).all()


def test_a_reference_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    """Every batch that holds such a pair would be skipped."""
    message, unknown = run_ranks(compute_unusable, 1, tmp_path / "key.npy")[0]
    assert f"of {SAMPLES} samples is not finite" in message
    assert all(unknown)
