"""The order of what a GPU is asked to do by a save, on tensors that claim to be on one."""

import logging
from collections.abc import Iterator
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.conftest import MANIFEST, make_state
from toolkit.checkpoint import copies
from toolkit.checkpoint.copies import HostCopies, wait_for_copies
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.saver import Saver
from toolkit.checkpoint.shards import QUANTITIES, StateShard
from toolkit.checkpoint.store import CheckpointStore

GPU = torch.device("cuda", 3)


class OnGpu(Tensor):
    """A tensor whose memory is the host's."""

    device = GPU  # type: ignore[assignment]


class Gpu:
    """Its streams and events, and in `done` what they were asked for."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.room = 10**9
        """Bytes of pinned memory."""
        self.pinned: list[Tensor] = []
        self.pinned_by: set[str] = set()
        """Names of threads."""


class Stream:
    def __init__(self, gpu: Gpu, name: str = "side") -> None:
        self.gpu, self.name = gpu, name

    def __enter__(self) -> None:
        self.gpu.done.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, other: "Stream") -> None:
        self.gpu.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "Event") -> None:
        self.gpu.done.append(f"{self.name} waits for {event.name}")

    def record_event(self, event: "Event") -> "Event":
        event.name = f"event of {self.name}"
        self.gpu.done.append(event.name)
        return event


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.name = gpu, ""

    def synchronize(self) -> None:
        self.gpu.done.append(f"host waits for {self.name}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu, empty, copy = Gpu(), torch.empty, Tensor.copy_

    def pinned(*size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*size, **options)
        if pin_memory:
            if made.nbytes > gpu.room:
                raise RuntimeError("CUDA error: out of memory")
            gpu.room -= made.nbytes
            gpu.pinned.append(made)
            gpu.pinned_by.add(current_thread().name)
        return made

    def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if isinstance(source, OnGpu):
            assert non_blocking
            gpu.done.append("copy")
        return copy(target, source.as_subclass(Tensor))

    compute = Stream(gpu, "compute")
    for name, value in {
        "Stream": lambda: Stream(gpu),
        "Event": lambda **_: Event(gpu),
        "current_stream": lambda: compute,
        "stream": lambda stream: stream,
        "current_device": lambda: 3,
        "set_device": lambda device: gpu.done.append(f"device {device}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda _, stream: gpu.done.append(f"kept for {stream.name}")
    )
    monkeypatch.setattr(copies, "_copied", None)
    yield gpu


def on_gpu(state: list[StateShard]) -> list[StateShard]:
    for shard in state:
        shard._values = {name: v.as_subclass(OnGpu) for name, v in shard._values.items()}
    return state


COPY = ["side waits for compute", "on side", "copy", "kept for side"]


def test_streams_wait_for_each_other_and_the_host_only_before_it_writes(gpu: Gpu) -> None:
    wait_for_copies()
    assert gpu.done == [], "there are none"
    held = HostCopies()
    held.begin()
    values = torch.arange(4.0)
    kept = [
        held.of(values.as_subclass(OnGpu), temporary=False),
        held.of(values.as_subclass(OnGpu), temporary=False),
    ]
    ends = held.end()
    wait_for_copies()
    assert gpu.done == [*COPY, *COPY, "event of side", "compute waits for event of side"]
    ends()
    assert gpu.done[-2:] == ["device 3", "host waits for event of side"]
    values.zero_()
    assert all(torch.equal(one, torch.arange(4.0)) for one in kept)
    assert kept[0].data_ptr() != kept[1].data_ptr()


def test_a_second_save_takes_the_buffers_of_the_first(gpu: Gpu, tmp_path: Any) -> None:
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
        assert gpu.done.count("copy") == len(gpu.pinned) == 6
        assert gpu.done[-2:] == ["device 3", "host waits for event of side"]
        other = make_state(9)
        for shard, meant in zip(other, make_state(seed), strict=True):
            SavedState(tmp_path / "step-00000001").load(shard)
            for quantity in QUANTITIES:
                assert torch.equal(shard.get(quantity), meant.get(quantity))
    saver.close()


def test_buffers_are_pinned_ahead_of_the_first_save_and_not_by_training(
    gpu: Gpu, tmp_path: Any
) -> None:
    saver = Saver(CheckpointStore(tmp_path, keep=1), asynchronous=True)
    state = on_gpu(make_state(1))
    saver.prepare(state)
    saver.save(MANIFEST, state, {})
    saved = saver.finished(wait=True)
    assert saved is not None and saved.problem is None, saved
    assert gpu.done[0] == "device 3" and gpu.done.count("copy") == len(gpu.pinned) == 6
    assert current_thread().name not in gpu.pinned_by
    saver.close()


def test_the_memory_of_frozen_weights_in_fp32_is_used_again(gpu: Gpu, tmp_path: Any) -> None:
    """By the compute stream, which waits: they are copies, and there may be many."""
    (block,) = make_state()[0].blocks
    frozen = torch.ones(12, 4, dtype=torch.bfloat16).as_subclass(OnGpu)
    saver = Saver(CheckpointStore(tmp_path, keep=1), asynchronous=True)
    saver.save(MANIFEST, [StateShard([block], {"weight": frozen}, saved_here=True)], {})
    assert gpu.done[:4] == [*COPY[:3], "compute waits for side"]
    assert saver.finished(wait=True)
    saver.close()


def test_without_room_copies_are_pageable_and_that_is_logged_once(
    gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.room, values, held = 20, torch.arange(4.0), HostCopies()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            held.begin()
            kept = [held.of(values.as_subclass(OnGpu), temporary=False) for _ in range(3)]
            held.end()
    assert [one is gpu.pinned[0] for one in kept] == [True, False, False]
    assert all(torch.equal(one, values) and one is not values for one in kept)
    (record,) = caplog.records
    assert "no more pinned memory" in record.message


def test_tensors_on_the_host_are_copied_as_ever(gpu: Gpu) -> None:
    values, held = torch.arange(4.0), HostCopies()
    held.begin()
    kept = held.of(values, temporary=False)
    held.end()()
    values.zero_()
    assert torch.equal(kept, torch.arange(4.0)) and gpu.done == gpu.pinned == []
