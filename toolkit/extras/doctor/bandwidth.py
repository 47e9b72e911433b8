"""Communication bandwidth: collectives at a few sizes, against the link's peak.

    python -m toolkit.extras.doctor.bandwidth RESULT.json

Algorithm bandwidth is size / time. Bus bandwidth is what each link carries, so that it can be
compared with the link's peak for any number of ranks: algorithm bandwidth times a factor of the
operation (NVIDIA/nccl-tests, doc/PERFORMANCE.md).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from toolkit.doctor.bench import Bench, Tell, main
from toolkit.doctor.calibrate import catalogue_name
from toolkit.engines.distributed import Ranks
from toolkit.errors import PlanError
from toolkit.hardware.cluster import default_cluster
from toolkit.plan.cost.collectives import Group, Network

BUDGET_S = 0.5
"""How long one operation of one size is measured."""
MIB = 2**20
CPU_SIZES = (MIB // 4, 4 * MIB, 32 * MIB)
GPU_SIZES = (MIB, 32 * MIB, 256 * MIB)


@dataclass(frozen=True)
class Rate:
    """One operation at one size."""

    operation: str
    message_bytes: int
    """The tensor that every rank holds whole: an all-gather's output, a reduce-scatter's
    input, what is reduced, or one message."""
    seconds: float
    algorithm_bytes_per_s: float
    bus_bytes_per_s: float
    peak_bytes_per_s: float | None
    """Of the slowest link that it uses, each way, by the hardware catalogue (nominal for a
    processor); None for a device that is not in it."""


@dataclass(frozen=True)
class Bandwidth:
    """What `world` ranks reach on `nodes` machines."""

    gpu: str
    """Name of the hardware catalogue, or the device's own where that lacks it."""
    nodes: int
    world: int
    rates: tuple[Rate, ...]


def measure(ranks: Ranks, sizes: tuple[int, ...], tell: Tell) -> Bandwidth:
    """Measure every operation at every size; collective. `tell` gets a line about each."""
    bench = Bench(ranks, BUDGET_S)
    name, nodes = _gpu(ranks), max(1, ranks.world // ranks.local_world)
    ring, message = _peaks(name, nodes, ranks.local_world)
    rates = []
    for operation, (run, factor) in _OPERATIONS.items():
        for size in sizes:
            # Every rank's part must have the same number of elements.
            elements = max(1, size // 4 // ranks.world) * ranks.world
            trial = _Trial(ranks, elements)
            seconds = bench.seconds(partial(run, trial))
            rate = elements * 4 / seconds
            peak = message if operation == "p2p" else ring
            rates.append(
                Rate(operation, elements * 4, seconds, rate, rate * factor(ranks.world), peak)
            )
            tell(f"{operation:<14} {elements * 4 / MIB:8.4g} MiB  {seconds * 1e3:8.3g} ms")
    return Bandwidth(name, nodes, ranks.world, tuple(rates))


class _Trial:
    """Buffers of one size, and the operations on them."""

    def __init__(self, ranks: Ranks, elements: int) -> None:
        """`elements`: fp32 numbers of the whole message, as many of every rank."""
        self.whole = torch.zeros(elements, device=ranks.device)
        self.part = torch.zeros(elements // ranks.world, device=ranks.device)
        self.arrived = torch.zeros(elements, device=ranks.device)
        self.after = (ranks.rank + 1) % ranks.world
        self.before = (ranks.rank - 1) % ranks.world

    def all_reduce(self) -> None:
        dist.all_reduce(self.whole)

    def all_gather(self) -> None:
        _ALL_GATHER(self.whole, self.part)

    def reduce_scatter(self) -> None:
        _REDUCE_SCATTER(self.part, self.whole)

    def send_receive(self) -> None:
        """Every rank sends to the next one and receives from the one before, all at once."""
        send = dist.P2POp(dist.isend, self.whole, self.after)
        receive = dist.P2POp(dist.irecv, self.arrived, self.before)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()


# torch 2.13 renamed them; earlier ones have only the old names.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_OPERATIONS: Mapping[str, tuple[Callable[[_Trial], None], Callable[[int], float]]] = {
    "all-reduce": (_Trial.all_reduce, lambda n: 2 * (n - 1) / n),
    "all-gather": (_Trial.all_gather, lambda n: (n - 1) / n),
    "reduce-scatter": (_Trial.reduce_scatter, lambda n: (n - 1) / n),
    "p2p": (_Trial.send_receive, lambda _: 1.0),
}
"""The operation, and the ratio of bus to algorithm bandwidth for n ranks."""


def _gpu(ranks: Ranks) -> str:
    if ranks.device.type == "cpu":
        return "cpu"
    return catalogue_name(torch.cuda.get_device_properties(ranks.device).name)


def _peaks(gpu: str, nodes: int, gpus_per_node: int) -> tuple[float, float] | tuple[None, None]:
    """Between neighbours of a ring over all ranks, and of one message between any two.

    A ring leaves each machine through all its adapters together; a message between two
    machines has one accelerator's share.
    """
    try:
        cluster = default_cluster(nodes, gpus_per_node, gpu)
    except PlanError:
        return None, None
    near, far = cluster.node_link.bytes_per_s, cluster.network.bytes_per_s
    ring = Group(cluster.gpus, nodes, Network(cluster.island, near, far)).bytes_per_s
    return ring, near if nodes == 1 else min(near, far)


def measure_here(ranks: Ranks, tell: Tell) -> Bandwidth:
    """Measure with the sizes for this device."""
    return measure(ranks, GPU_SIZES if ranks.device.type == "cuda" else CPU_SIZES, tell)


if __name__ == "__main__":
    main(measure_here)
