"""Which GPU a rank takes, and what it joins: torch.cuda is replaced by as much of it as that
needs."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from toolkit.engines import distributed
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
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What the process group was asked to be; a fake one of two ranks is joined."""
    asked: list[dict[str, Any]] = []
    join_for_real = dist.init_process_group

    def init_process_group(**options: Any) -> None:
        asked.append(options)
        join_for_real("fake", store=FakeStore(), rank=0, world_size=2)
        dist.group.WORLD.bound_device_id = options.get("device_id")

    monkeypatch.setattr(dist, "init_process_group", init_process_group)
    for name in (*TORCHRUN, "TORCHELASTIC_MAX_RESTARTS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that what `join` sets is undone
        monkeypatch.delenv(name)
    yield asked
    if dist.is_initialized():
        dist.destroy_process_group()


def have_gpus(
    monkeypatch: pytest.MonkeyPatch, count: int, environment: Mapping[str, str] | None = None
) -> list[torch.device]:
    """Devices that are chosen on a machine that shows `count` GPUs."""
    for name, value in (environment or {}).items():
        monkeypatch.setenv(name, value)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    return chosen


@pytest.mark.parametrize(("shown", "index"), [(1, 0), (4, 3)])
def test_a_scheduler_may_show_each_rank_its_gpu_only(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]], shown: int, index: int
) -> None:
    chosen = have_gpus(monkeypatch, shown, SRUN)
    ranks = join()
    assert ranks.device == torch.device("cuda", index)
    assert chosen == [ranks.device]
    assert ranks.local_rank == 3, "the leader of a machine is one of its ranks"
    (asked,) = joined
    assert (asked["backend"], asked["device_id"]) == ("nccl", ranks.device)


def test_later_groups_are_not_split_off(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]]
) -> None:
    """All ranks would have to take part in each split: 1,553 for megatron-core on 256 GPUs."""
    have_gpus(monkeypatch, 4, TORCHRUN)
    join()
    assert "device_id" in joined[0], "NCCL connects at once"
    splits: list[object] = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", splits.append)
    for ranks in ([0], [1], [0, 1]):
        dist.new_group(ranks)
    assert not splits


def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]]
) -> None:
    have_gpus(monkeypatch, 1, TORCHRUN)
    with pytest.raises(BackendUnavailable, match="rank 3 has no GPU: 4 processes"):
        join()
    assert not joined


@pytest.mark.parametrize(("gpus", "backend"), [(1, "nccl"), (0, "gloo")])
def test_one_rank_binds_no_device(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]], gpus: int, backend: str
) -> None:
    """Bound, every later group would be split off by NCCL, which has nobody to reach."""
    have_gpus(monkeypatch, gpus)
    assert join().device == torch.device("cuda:0" if gpus else "cpu")
    assert joined[0]["backend"] == backend and "device_id" not in joined[0]


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        ("0-1,64-65\n", {0, 1}),
        ("0-127\n", {0, 1, 2, 3}),  # of a virtual machine, whose GPU has no node
        ("8-15\n", None),  # the launcher chose the other node's
        (None, None),
    ],
)
def test_a_rank_keeps_to_the_cores_next_to_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
    joined: list[dict[str, Any]],
    tmp_path: Path,
    listed: str | None,
    kept: set[int] | None,
) -> None:
    """And computes convolutions in fp32, which torch computes in TF32."""
    monkeypatch.setattr(distributed, "_PCI_DEVICES", tmp_path)
    if listed is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text("-1\n")
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(listed)
    bound: list[set[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cores: bound.append(cores))
    have_gpus(monkeypatch, 1)
    join()
    assert joined and bound == ([] if kept is None else [kept])
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("stated", "agent", "gpus", "cores", "threads"),
    [
        (None, "", 4, 12, [3]),
        (None, "", 0, 2, [1]),
        ("1", "torchrun", 4, 12, [3]),
        ("1", "torchrun", 0, 12, []),
        ("3", "", 4, 12, []),
    ],
)
def test_the_threads_of_an_offloaded_optimizer(
    monkeypatch: pytest.MonkeyPatch,
    joined: list[dict[str, Any]],
    stated: str | None,
    agent: str,
    gpus: int,
    cores: int,
    threads: list[int],
) -> None:
    """torchrun states one thread, `deepspeed` all cores; CPUAdam needs this rank's share."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    for name, value in (("OMP_NUM_THREADS", stated), ("TORCHELASTIC_RUN_ID", agent)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    have_gpus(monkeypatch, gpus, TORCHRUN)
    join()
    assert joined and chosen == threads


def test_several_restarting_agents_must_not_share_their_store(
    monkeypatch: pytest.MonkeyPatch, joined: list[dict[str, Any]]
) -> None:
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "2"}
    have_gpus(monkeypatch, 0, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"} | agent)
    with pytest.raises(BackendUnavailable) as caught:
        join()
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in caught.value.fix and not joined
    assert "--rdzv-backend c10d" in caught.value.fix, "torchrun's default keeps its store"
