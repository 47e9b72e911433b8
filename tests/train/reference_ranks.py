"""What each rank of test_reference.py does: tables of the reference by the fake engine."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.engines.fake import FakeEngine
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
    order = EpochOrder(3, len(table.samples))
    four = BatchSizes.of([4], table.samples.sequence_length)
    training = GlobalBatches(table.samples, order, four).micro_batches(8, 0, sizes)
    validation = evaluation_batches(table.samples, 4, 100, 0, sizes)
    both = {"training": training, "validation": validation}
    return {
        name: [
            (sample, batch.extra["reference_log_probs"][2 * place : 2 * place + 2].tolist())
            for batch in some
            for place, sample in enumerate(batch.samples)
        ]
        for name, some in both.items()
    }
