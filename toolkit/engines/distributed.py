"""Joining the process group, and the few sums that every data-parallel engine needs."""

import gc
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from toolkit.batch import MicroBatch
from toolkit.engines.scheduler_ranks import scheduler_ranks
from toolkit.errors import BackendUnavailable, DataError

_PCI_DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Ranks:
    """This process's place among all ranks."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    device: torch.device


def join(timeout: timedelta = timedelta(minutes=30)) -> Ranks:
    """Join the process group that the launcher's environment describes.

    Works for every launcher that sets RANK, WORLD_SIZE and LOCAL_RANK, for `srun` and for Open
    MPI. Without any of these the run has one process. Uses NCCL on GPUs, where tensors in host
    memory need a separate gloo group (`AllRanks.group`), and gloo on CPUs.
    """
    placed = scheduler_ranks(os.environ)
    os.environ.update(placed)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    ranks = Ranks(rank, world, local_rank, local_world, torch.device("cpu"))
    _allow_all_files()
    on_gpu = torch.cuda.is_available()
    _share_cores(local_world, on_gpu=on_gpu)
    if on_gpu:
        ranks = replace(ranks, device=_gpu(ranks, may_be_alone=bool(placed)))
        _keep_near(ranks.device)
        torch.cuda.set_device(ranks.device)
        torch.backends.cudnn.allow_tf32 = False  # torch's default for fp32 convolutions
    else:
        # Spares DeepSpeed a search and a warning.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    _join(ranks, timeout)
    return ranks


def _gpu(ranks: Ranks, *, may_be_alone: bool) -> torch.device:
    """This rank's GPU. `may_be_alone`: a scheduler may expose only one GPU to each rank, as
    device 0. Raises BackendUnavailable if there are fewer GPUs than ranks."""
    count = torch.cuda.device_count()
    index = 0 if may_be_alone and count == 1 else ranks.local_rank
    if index >= count:
        raise BackendUnavailable(
            f"rank {ranks.rank} has no GPU: {ranks.local_world} processes on this machine, "
            f"{count} GPUs",
            fix="set cluster.gpus_per_node to the number of GPUs",
        )
    return torch.device("cuda", index)


def _keep_near(device: torch.device) -> None:
    """Restrict this process to the cores next to its GPU, where its pinned memory then lies,
    too. Does nothing if the kernel states no node, or the launcher chose only other cores.

    `torch.numa` takes node 0 for a GPU without a node, such as those of virtual machines.
    """
    with suppress(AttributeError, ImportError, OSError, ValueError):
        from torch.numa.binding import _get_set_of_int_from_ranges_str as cores

        gpu: Any = torch.cuda.get_device_properties(device)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        listed = (_PCI_DEVICES / address / "local_cpulist").read_text()
        if near := cores(listed) & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near)


def _join(ranks: Ranks, timeout: timedelta) -> None:
    """Create the default group, whose backend other groups inherit."""
    on_gpu, rank, world = ranks.device.type == "cuda", ranks.rank, ranks.world
    options: dict[str, Any] = {"backend": "nccl" if on_gpu else "gloo"}
    if on_gpu and world > 1:
        # NCCL then connects eagerly: a broken network fails here and not in the first step.
        options["device_id"] = ranks.device
    if store := _own_store(ranks, timeout):
        dist.init_process_group(
            store=store, rank=rank, world_size=world, timeout=timeout, **options
        )
    elif "RANK" in os.environ:
        dist.init_process_group(timeout=timeout, **options)
    else:
        # DeepSpeed reads these even in a run of one process.
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        dist.init_process_group(store=HashStore(), rank=0, world_size=1, **options)
    if "device_id" in options:
        # Bound, every later group would be split off from all ranks, which they would do one
        # after the other, and its messages between two ranks would wait for each other.
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = None


def _own_store(ranks: Ranks, timeout: timedelta) -> Store | None:
    """Where ranks find each other if PyTorch's own store does not do. None where it does.

    Agents of torchrun that restart ranks keep one store, in which restarted ranks would find
    the addresses of dead ones, and fail or wait until every restart is used up (torch 2.13). On
    one machine, the number of the restart tells them apart. Several agents count differently.
    Raises BackendUnavailable for several, OSError if the port is taken.
    """
    local = ranks.local_world == ranks.world
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        if not int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)):
            return None
        if not local:
            raise BackendUnavailable(
                "torchrun --max-restarts would restart ranks with the store of those before",
                fix="on every machine: TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun "
                "--rdzv-backend c10d …",
            )
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.world, timeout=timeout))
        return PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    if not local or os.environ.get("MASTER_ADDR") not in ("127.0.0.1", "localhost"):
        return None
    # Only this listens at the loopback address alone; PyTorch's at all, for anybody.
    address = "127.0.0.1", int(os.environ["MASTER_PORT"])
    if ranks.rank > 0:
        return TCPStore(*address, ranks.world, timeout=timeout)
    listening = socket.create_server(address, backlog=2048).detach()  # the store closes it
    return TCPStore(*address, ranks.world, True, timeout=timeout, master_listen_fd=listening)


def limit_collectives(limit: timedelta, *, but: dist.ProcessGroup) -> None:
    """Set the timeout of the collectives of all existing groups, except `but`, to `limit`.

    Uses `_set_pg_timeout`, as torchtitan does: there is no public function, and the groups that
    DeepSpeed and megatron-core create have PyTorch's own limit of 10 or 30 minutes.
    """
    for group in distributed_c10d._world.pg_map:  # the groups that this rank belongs to
        if group is not but:
            distributed_c10d._set_pg_timeout(limit, group)


def rank_here() -> int:
    """This process's rank, before it has joined. Raises PlanError as `scheduler_ranks` does."""
    return int({**os.environ, **scheduler_ranks(os.environ)}.get("RANK", 0))


def _allow_all_files() -> None:
    """Raise the soft limit of open files to the hard one: gloo, which aborts the process
    without one, opens a socket to every other rank in each group."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _share_cores(processes: int, *, on_gpu: bool = False) -> None:
    """Divide the cores between the machine's processes, unless the launcher did.

    `deepspeed` leaves every process all cores: two of them on two cores then wait for
    each other's threads and train fifty times slower. torchrun gives each process one where
    none are stated: with GPUs, all others would idle while an offloaded optimizer steps.
    """
    stated = os.environ.get("OMP_NUM_THREADS")
    of_torchrun = stated == "1" and "TORCHELASTIC_RUN_ID" in os.environ
    if stated is None or (on_gpu and of_torchrun):
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))


def leave() -> None:
    """Leave the process group, if joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """Exit immediately with `code`, after flushing the output.

    Interpreter teardown is skipped: threads of an unfinished collective would keep a failed
    rank alive, and gloo's threads sometimes abort a rank that has finished ("terminate called
    without an active exception": 3 of 28 exits measured). Temporary folders of libraries are
    removed as there. wandb makes two when it is imported.
    """
    for one in gc.get_objects():
        if type(one) is TemporaryDirectory:
            with suppress(OSError):
                one.cleanup()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def running_sum(value: Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], Tensor]:
    """Start summing `value` in place over the ranks of `group` (None: all). Collective.

    Returns what waits for the sum, for subsequent work on the device: a blocking sum would make
    all ranks wait for the slowest each time.
    """
    work = dist.all_reduce(value, group=group, async_op=True)
    assert work is not None

    def result() -> Tensor:
        work.wait()
        return value

    return result


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of all gradients together: float64 scalar."""
    return joint_norm(p.grad for p in parameters if p.grad is not None)


def joint_norm(tensors: Iterable[Tensor]) -> Tensor:
    """L2 norm of all tensors together: float64 scalar.

    Uses `sum`, which adds pairwise: torch's own fp32 norm of a large CPU tensor adds the
    squares sequentially and is wrong in the fourth digit for two million elements.
    """
    squares = [tensor.square().sum().double() for tensor in tensors]
    return torch.stack(squares).sum().sqrt()


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """The batch on `device`. Raises DataError if positions do not restart with segments."""
    if batch.segments is not None and not _restarts(batch.segments, batch.positions):
        raise DataError(
            "the batch has segments, but its positions do not restart where a document begins, "
            "or restart elsewhere",
            fix="give positions that count each document from 0",
        )
    return batch.to(device)


def _restarts(segments: Tensor, positions: Tensor | None) -> bool:
    """Whether positions are consecutive except where a document begins.

    transformers detects documents from positions, megatron-core's models from segments.
    """
    if positions is None:
        return False
    return torch.equal(positions.diff() != 1, segments.diff() != 0)
