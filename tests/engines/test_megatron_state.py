"""What of megatron-core's optimizer a checkpoint holds besides tensors."""

import random
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="module")
def state() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core warns of much when it is imported
        from toolkit.engines.megatron import state
    return state


def optimizer(tokens_log2: int) -> SimpleNamespace:
    """With the scaler of fp16 for so many tokens of a rank."""
    smallest = 2.0**-tokens_log2
    scaler = SimpleNamespace(
        scale=torch.tensor([65536 * smallest]), min_scale=torch.tensor([smallest]),
        _growth_tracker=3, _hysteresis_tracker=2,
    )  # fmt: skip
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(grad_scaler=scaler)])


@pytest.mark.parametrize("tokens_log2", [0, 8, 12])
def test_a_checkpoint_has_the_scale_of_the_mean_loss(
    state: ModuleType, tokens_log2: int
) -> None:
    """A mean's is what DeepSpeed and torch scale: another engine, or batch, can continue."""
    saved = state.loss_scale(optimizer(tokens_log2))
    assert saved is not None
    assert saved["scale"] == 65536


def test_a_scale_of_another_engine_is_made_one_of_a_sum(state: ModuleType) -> None:
    other = optimizer(8)
    state.set_loss_scale(other, {"scale": 1024.0, "detail": {}}, torch.device("cpu"))
    scaler = other.chained_optimizers[0].grad_scaler
    assert scaler._scale.item() == 4.0
    assert scaler._growth_tracker == 3, "counts of another scaler mean nothing"


@pytest.mark.usefixtures("megatron_core")
def test_groups_are_destroyed_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last created first: in NCCL, ranks that destroy them in different orders wait
    indefinitely. A set's order differs between ranks: hashes are addresses."""
    from megatron.core import parallel_state

    from toolkit.models.megatron.model import leave_groups

    created = [object() for _ in range(100)]
    random.Random(0).shuffle(created)
    destroyed: list[object] = []
    listed = [None, *created[:50], created[0], dist.GroupMember.NON_GROUP_MEMBER, *created[50:]]
    monkeypatch.setattr(parallel_state, "_global_process_group_list", listed)
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    leave_groups()
    assert destroyed == created[::-1]
