"""What every rank does before an engine is built."""

import os

import pytest
import torch

from toolkit.engines.distributed import _share_cores


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
