"""What owners add to the predicted step time: by arithmetic on the model's matrices."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.plan.making import TINY, optimizer_of
from toolkit.hardware.cluster import default_cluster
from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.optimizers.muon import MUON
from toolkit.plan.cost.efficiency import DEFAULT
from toolkit.plan.cost.operators import device, matmul_s
from toolkit.plan.cost.owned import owner_updates
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
        with_muon["update"] - without["update"]
    )
    return with_muon["update"] - without["update"]


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
    flops = MUON.whole.operations
    assert flops((2, 3)) == flops((3, 2)) == 5 * (24 + 16 + 24)


def test_one_rank_computes_all() -> None:
    assert added(LLAMA, Layout()) == pytest.approx(6 * seconds(*ATTENTION, *MLP))
    assert added(MIXTRAL, Layout()) == pytest.approx(
        6 * seconds(*ATTENTION, (8, 1024), *(8 * MLP))
    )


def test_owners_share_the_work() -> None:
    """Also those of a stage of two, with three layers on 4 ranks."""
    layer = seconds(*ATTENTION, *MLP)
    for layout in (Layout(dp=4, tp=2), Layout(dp=8, zero_stage=1), Layout(dp=4, pp=2)):
        assert added(LLAMA, layout) == pytest.approx(6 * layer / 8)


def test_experts_are_shared_too() -> None:
    whole = 6 * (seconds(*ATTENTION, (8, 1024)) + 8 * seconds(*MLP))
    assert added(MIXTRAL, Layout(dp=8, ep=4)) == pytest.approx(whole / 8)


def test_frozen_matrices_cost_nothing() -> None:
    frozen = owner_updates(LLAMA, ("model.layers.*",), optimizer_of("muon"))
    assert frozen is not None
    assert frozen.tensors == ()
