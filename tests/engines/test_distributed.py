"""What every rank does before an engine is built: which GPU it takes, and what it joins.
torch.cuda is replaced by as much of it as that needs."""

import resource
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.forked import ForkedRanks, run_ranks
from toolkit.batch import MicroBatch
from toolkit.engines import distributed
from toolkit.engines.distributed import join, leave, to_device
from toolkit.errors import BackendUnavailable, DataError

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


def joined_with_few_files() -> tuple[int, int]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    join()
    leave()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_a_rank_may_open_as_many_files_as_the_machine_allows() -> None:
    """gloo has a socket to every other rank: 1,024 ranks need more than the usual limit."""
    ((soft, hard),) = run_ranks(joined_with_few_files, 1)
    assert soft == hard


def test_every_tensor_of_a_batch_is_moved() -> None:
    names = [field.name for field in fields(MicroBatch)]
    tensors = {name: torch.zeros(1, 2) for name in names if name not in ("extra", "samples")}
    batch = MicroBatch(**tensors, extra={"pairs": torch.zeros(1)}, samples=(7,))
    moved = batch.to(torch.device("meta"))
    assert all(getattr(moved, name).is_meta for name in tensors)
    assert moved.extra["pairs"].is_meta
    assert moved.samples == (7,)


@pytest.mark.parametrize("positions", [None, [0, 1, 2, 3], [0, 1, 0, 0], [0, 0, 1, 2]])
def test_positions_that_disagree_with_segments_are_refused(positions: list[int] | None) -> None:
    """transformers would isolate other documents than megatron-core's models."""
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    segments = torch.tensor([[0, 0, 1, 1]], dtype=torch.int32)
    batch = MicroBatch(
        tokens, tokens, segments=segments, positions=torch.tensor([[0, 1, 0, 1]])
    )
    to_device(batch, torch.device("cpu"))
    wrong = replace(batch, positions=None if positions is None else torch.tensor([positions]))
    with pytest.raises(DataError, match="positions do not restart where a document begins"):
        to_device(wrong, torch.device("cpu"))


def listening() -> set[str]:
    join()
    found = psutil.Process().net_connections("tcp")
    leave()
    return {one.laddr.ip for one in found if one.status == "LISTEN"}


def test_the_store_of_local_ranks_listens_on_loopback_only() -> None:
    """PyTorch's own listens at every address of the machine, for anybody."""
    assert run_ranks(listening, 1) == [{"127.0.0.1"}]


def temporary() -> int:
    global kept  # or it would be gone before the process ends
    kept = TemporaryDirectory()
    print(kept.name)
    return 0


def test_an_ended_process_leaves_no_temporary_folder(tmp_path: Path) -> None:
    """Forked ranks end as those of the product do."""
    ranks = ForkedRanks(temporary, (), 1, tmp_path)
    assert ranks.end() == [0]
    *_, folder = ranks.printed().split()
    assert folder and not Path(folder).exists()
