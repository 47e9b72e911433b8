"""What every rank does before an engine is built."""

import os
from dataclasses import fields

import pytest
import torch

from toolkit.batch import MicroBatch
from toolkit.engines.distributed import _share_cores, to_device
from toolkit.errors import DataError


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_cores_are_divided_unless_the_launcher_did(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _share_cores(1)
    assert torch.get_num_threads() == cores
    _share_cores(2 * cores)
    assert torch.get_num_threads() == 1, "more processes than cores: one each, not none"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    _share_cores(1)
    assert torch.get_num_threads() == 1


def test_every_tensor_of_a_batch_is_moved() -> None:
    names = [field.name for field in fields(MicroBatch)]
    tensors = {name: torch.zeros(1, 2) for name in names if name not in ("extra", "samples")}
    batch = MicroBatch(**tensors, extra={"pairs": torch.zeros(1)}, samples=(7,))
    moved = batch.to(torch.device("meta"))
    assert all(getattr(moved, name).is_meta for name in tensors)
    assert moved.extra["pairs"].is_meta
    assert moved.samples == (7,)


def test_segments_are_refused_and_not_ignored() -> None:
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    batch = MicroBatch(tokens, tokens, segments=tokens.int())
    with pytest.raises(DataError, match="no engine isolates the documents"):
        to_device(batch, torch.device("cpu"))
