"""Batches that a thread builds one step ahead: the same ones and errors, no thread left.

torch.cuda is replaced by as much of it as a thread needs, so that the loop runs as with a GPU.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines.fake import FakeEngine
from tests.train.fake_runs import (
    LAYOUT,
    SIZES,
    STEPS,
    VOCABULARY,
    job,
    run,
)
from toolkit.batch import MicroBatch
from toolkit.data.batches import GlobalBatches
from toolkit.data.order import EpochOrder
from toolkit.data.rows import Row
from toolkit.engines.base import StepResult
from toolkit.errors import DataError
from toolkit.train.prefetch import Prefetch
from toolkit.train.shared import Progress

PER_STEP = LAYOUT.global_batch
PATIENCE_S = 20.0


@dataclass
class Numbers:
    """Samples made from their numbers; `before` is called with each that is read."""

    before: Callable[[int], None] = lambda _: None
    sequence_length = 8
    rows_per_sample = 1

    def __len__(self) -> int:
        return 10_000

    def rows(self, index: int) -> Sequence[Row]:
        self.before(index)
        tokens = (np.arange(9, dtype=np.int64) * index) % VOCABULARY
        return [Row(tokens[:-1], tokens[1:])]


class Watching(FakeEngine):
    """Trains nothing: writes down the samples of every step and calls `during`."""

    def __init__(self, during: Callable[[int], None] = lambda _: None) -> None:
        super().__init__(VOCABULARY)
        self.during = during
        self.samples: list[tuple[int, ...]] = []

    def train_step(self, micro_batches: Sequence[MicroBatch], *_: Any) -> StepResult:
        self.samples.append(tuple(i for batch in micro_batches for i in batch.samples))
        self.during(len(self.samples))
        return StepResult(loss=1.0, grad_norm=1.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, object]]]:
    """Which thread did what with device 3; in the end, none of them is left."""
    done: list[tuple[str, object]] = []

    def here(what: object) -> None:
        done.append((threading.current_thread().name, what))

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        here("pin")
        return tensor.clone()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", here)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    yield done
    until = time.monotonic() + PATIENCE_S
    while left := [one for one in threading.enumerate() if one.name.startswith("prefetch")]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


@pytest.mark.parametrize("done", [0, 7, STEPS - 1])
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_sequence_is_that_of_the_order(
    done: int, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "gpu":
        request.getfixturevalue("gpu")
    engine = Watching()
    run(job(Numbers(), engine), Progress(done, done * PER_STEP))
    batches = GlobalBatches(Numbers(), EpochOrder(1, len(Numbers())), SIZES)
    assert engine.samples == [
        tuple(
            sample
            for batch in batches.micro_batches(step * PER_STEP, 0, LAYOUT.micro_batches)
            for sample in batch.samples
        )
        for step in range(done, STEPS)
    ]


@pytest.mark.usefixtures("gpu")
def test_the_next_batch_is_built_while_a_step_runs() -> None:
    """Within step k (from 1), all samples of the steps up to k + 2 come to be read."""
    read, loop = 0, threading.get_ident()
    more = threading.Condition()

    def before(_: int) -> None:
        nonlocal read
        assert threading.get_ident() != loop
        with more:
            read += 1
            more.notify()

    def during(step: int) -> None:
        wanted = PER_STEP * min(step + 2, STEPS)
        with more:
            assert more.wait_for(lambda: read == wanted, PATIENCE_S), (step, read)

    run(job(Numbers(before), Watching(during)))


@pytest.mark.usefixtures("gpu")
def test_an_error_in_the_data_is_the_one_that_ends_the_run() -> None:
    """With the batch in which it is, not with those that were built before."""
    read = 0

    def before(_: int) -> None:
        nonlocal read
        read += 1
        if read > 5 * PER_STEP:
            raise DataError("row 17 is wrong", fix="correct it")

    engine, progress = Watching(), Progress()
    with pytest.raises(DataError, match="row 17 is wrong"):
        run(job(Numbers(before), engine), progress)
    assert progress.step == 4, "the batch of step 6 was wanted before step 5"


@pytest.mark.usefixtures("gpu")
def test_who_leaves_does_not_wait_for_data_that_hangs() -> None:
    hanging = threading.Event()

    def build(step: int) -> list[MicroBatch]:
        if step == 2:
            hanging.wait(PATIENCE_S)
        return []

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Prefetch(build, 0) as prefetch:
        prefetch.take()
        prefetch.take()
        raise KeyboardInterrupt
    assert time.monotonic() - started < PATIENCE_S / 2
    hanging.set()


@pytest.mark.usefixtures("gpu")
def test_waiting_for_slow_data_is_measured() -> None:
    def slow(_: int) -> None:
        time.sleep(0.02)

    reports = run(job(Numbers(slow), Watching(), steps=6)).reports
    waited = [report.data_wait_s for report in reports]
    assert 0.5 < sum(waited) / sum(report.seconds for report in reports) <= 1
    assert waited[-1] < max(waited) / 2, "behind the last step there is nothing to build"


def test_batches_are_pinned_on_the_device_of_the_run(gpu: list[tuple[str, object]]) -> None:
    """A thread has device 0 until it is told otherwise."""
    tokens = torch.arange(8).reshape(2, 4)
    batch = MicroBatch(tokens, tokens, extra={"reference": torch.ones(2)}, samples=(5, 6))
    with Prefetch(lambda _: [batch], 0) as prefetch:
        ((taken,), _) = prefetch.take()
    assert gpu[:4] == [("prefetch_0", 3), *[("prefetch_0", "pin")] * 3]
    assert torch.equal(taken.input_ids, tokens) and taken.samples == (5, 6)
    assert taken.positions is None and torch.equal(taken.extra["reference"], torch.ones(2))
