"""Copies of a save, of tensors that claim to be on a GPU."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.conftest import MANIFEST, make_state
from toolkit.checkpoint.copies import HostCopies
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.saver import Saver
from toolkit.checkpoint.shards import QUANTITIES, StateShard
from toolkit.checkpoint.store import CheckpointStore


class OnGpu(Tensor):
    """A tensor whose memory is the host's."""

    device = torch.device("cuda", 3)  # type: ignore[assignment]


class Gpu:
    """A stream and its event, and in `done` what they were asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.room = 10**9
        """Bytes of pinned memory."""

    def record_event(self, _event: "Gpu") -> None:
        self.done.append("event")

    def synchronize(self) -> None:
        self.done.append("host waits")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu, empty, copy = Gpu(), torch.empty, Tensor.copy_

    def pinned(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*size, **options)
        if pin_memory:
            if made.nbytes > gpu.room:
                raise RuntimeError("CUDA error: out of memory")
            gpu.room -= made.nbytes
        return made

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(source, OnGpu):
            assert non_blocking
            gpu.done.append("copy")
        return copy(target, source.as_subclass(Tensor))

    for name, value in {
        "Event": lambda **_: gpu,
        "current_stream": lambda: gpu,
        "current_device": lambda: 3,
        "set_device": lambda device: gpu.done.append(f"device {device}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(Tensor, "copy_", copied)
    return gpu


def on_gpu(state: list[StateShard]) -> list[StateShard]:
    for shard in state:
        shard._values = {name: v.as_subclass(OnGpu) for name, v in shard._values.items()}
    return state


def test_the_writer_waits_for_one_event(gpu: Gpu, tmp_path: Any) -> None:
    saver = Saver(CheckpointStore(tmp_path, keep=1), asynchronous=True)
    for seed in (1, 2):
        gpu.done.clear()
        state = on_gpu(make_state(seed))
        saver.save(MANIFEST, state, {})
        for shard in state:
            for quantity in QUANTITIES:
                shard.get(quantity).fill_(7.0)
        saved = saver.finished(wait=True)
        assert saved is not None and saved.problem is None, saved
        assert gpu.done == [*["copy"] * 6, "event", "device 3", "host waits"]
        other = make_state(9)
        for shard, meant in zip(other, make_state(seed), strict=True):
            SavedState(tmp_path / "step-00000001").load(shard)
            for quantity in QUANTITIES:
                assert torch.equal(shard.get(quantity), meant.get(quantity))
    saver.close()


def test_without_room_copies_are_pageable_and_that_is_logged_once(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.room, values, copies = 20, torch.arange(4.0), HostCopies()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            kept = [copies.of(values.as_subclass(OnGpu)) for _ in range(3)]
            copies.end()
    assert gpu.done.count("copy") == 1 and gpu.room == 4
    assert all(torch.equal(one, values) and one is not values for one in kept)
    (record,) = caplog.records
    assert "no more pinned memory" in record.message
