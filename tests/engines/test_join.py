"""Which GPU a rank takes, and what it joins: torch.cuda is replaced by as much of it as that
needs."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from toolkit.engines.distributed import join
from toolkit.errors import BackendUnavailable

SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_STEP_NODELIST": "gpu1",
}
TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "4",
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the process group was asked to be; nothing is joined."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **options: asked.append(options))
    for name in (*TORCHRUN, "TORCHELASTIC_MAX_RESTARTS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what `join` sets is undone
        monkeypatch.delenv(name)
    return asked


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """Devices that are chosen on a machine that shows `count` GPUs."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(("shown", "index"), [(1, 0), (4, 3)])
def test_a_scheduler_may_show_each_rank_its_gpu_only(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]], shown: int, index: int
) -> None:
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    chosen = have_gpus(monkeypatch, shown)
    ranks = join()
    assert ranks.device == torch.device("cuda", index)
    assert chosen == [ranks.device]
    assert ranks.local_rank == 3, "the leader of a machine is one of its ranks"
    (asked,) = joined
    assert (asked["backend"], asked["device_id"]) == ("nccl", ranks.device)


def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]]
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    have_gpus(monkeypatch, 1)
    with pytest.raises(BackendUnavailable, match="rank 3 has no GPU: 4 processes"):
        join()
    assert not joined


def test_one_rank_binds_no_device(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]]
) -> None:
    """Bound, every later group would be split off by NCCL, which has nobody to reach."""
    have_gpus(monkeypatch, 1)
    assert join().device == torch.device("cuda", 0)
    assert joined[0]["backend"] == "nccl" and "device_id" not in joined[0]


def test_cpus_join_by_gloo(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    have_gpus(monkeypatch, 0)
    assert join().device == torch.device("cpu")
    assert joined[0]["backend"] == "gloo"
