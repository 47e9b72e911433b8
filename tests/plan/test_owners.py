"""What owners add to the predicted step time: by arithmetic on the model's matrices."""

import heapq
from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat
from random import Random

import pytest

from tests.plan.making import TINY, optimizer_of
from toolkit.hardware.cluster import default_cluster
from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.optimizers.muon import MUON, MuonSection
from toolkit.plan.cost.efficiency import DEFAULT
from toolkit.plan.cost.operators import device, matmul_s
from toolkit.plan.cost.owned import owner_updates
from toolkit.plan.cost.owners import busiest
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import Workload
from toolkit.recipe.schema import OptimizerName

LLAMA = TINY | {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_hidden_layers": 6,
}  # fmt: skip
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 8}
CLUSTER = default_cluster(1, 8, "h100-80gb")
ATTENTION = [(1024, 1024), (1024, 256), (1024, 256), (1024, 1024)]
MLP = [(1024, 4096)] * 3


def workload(config: Mapping[str, object], optimizer: OptimizerName = "muon") -> Workload:
    updates = owner_updates(config, (), optimizer_of(optimizer))
    return Workload(model_spec(config), 1024, "bf16", "ddp", updates=updates)


def added(config: Mapping[str, object], layout: Layout) -> float:
    """Seconds that Muon adds to a step of AdamW."""
    train = workload(config)
    with_muon, without = (
        step_time(one, layout, CLUSTER) for one in (train, replace(train, updates=None))
    )
    assert with_muon.total_s - without.total_s == pytest.approx(
        with_muon.optimizer_s - without.optimizer_s
    )
    return with_muon.optimizer_s - without.optimizer_s


def seconds(*matrices: tuple[int, int]) -> float:
    """Of five steps on matrices [m, n], m ≤ n: x xᵀ, its square, the product with x."""
    gpu = device(CLUSTER.gpu, workload(LLAMA), DEFAULT)
    return 5 * sum(
        matmul_s(m, m, n, gpu, plain=True) + matmul_s(m, m, m, gpu, plain=True)
        + matmul_s(m, n, m, gpu, plain=True)
        for m, n in (sorted(matrix) for matrix in matrices)
    )  # fmt: skip


def test_flops() -> None:
    assert MUON.whole is not None
    once, five = MuonSection(ns_steps=1), MuonSection()
    flops = MUON.whole.operations
    assert flops((2, 3), once) == flops((3, 2), once) == 24 + 16 + 24
    assert flops((2, 3), five) == 5 * 64


def test_one_rank_computes_all() -> None:
    assert added(LLAMA, Layout()) == pytest.approx(6 * seconds(*ATTENTION, *MLP))
    assert added(MIXTRAL, Layout()) == pytest.approx(
        6 * seconds(*ATTENTION, (8, 1024), *(8 * MLP))
    )


def test_the_busiest_owner_counts() -> None:
    """18 MLP matrices on 8 ranks: two have three, and no smaller one comes on top."""
    assert added(LLAMA, Layout(dp=8)) == pytest.approx(3 * seconds((1024, 4096)))
    assert added(LLAMA, Layout(dp=4, tp=2)) == pytest.approx(3 * seconds((1024, 4096)))
    # A stage of two: three layers, 9 matrices on 4 ranks.
    assert added(LLAMA, Layout(dp=4, pp=2)) == pytest.approx(3 * seconds((1024, 4096)))


def test_experts_are_their_ranks() -> None:
    """With expert parallel, each pair of ranks has 2 of 8 experts: 36 matrices on 2 ranks."""
    assert added(MIXTRAL, Layout(dp=8, ep=4)) == pytest.approx(
        18 * seconds((1024, 4096)) + max_dense(8)
    )


def max_dense(ranks: int) -> float:
    found = [seconds(matrix) for matrix in 6 * [*ATTENTION, (8, 1024)]]
    return one_by_one(dict.fromkeys(found, 0) | {s: found.count(s) for s in found}, ranks)


def one_by_one(costs: Mapping[float, int], ranks: int) -> float:
    loads = [0.0] * ranks
    for cost, count in sorted(costs.items(), reverse=True):
        for _ in repeat(None, count):
            heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


def test_equal_tensors_go_round() -> None:
    random = Random(0)
    for _ in range(200):
        costs = {float(random.randint(1, 40)): random.randint(1, 60) for _ in range(4)}
        ranks = random.randint(1, 20)
        assert busiest(costs, ranks) == one_by_one(costs, ranks), (costs, ranks)


def test_frozen_matrices_cost_nothing() -> None:
    frozen = owner_updates(LLAMA, ("model.layers.*",), optimizer_of("muon"))
    assert frozen is not None
    assert frozen.tensors == ()
