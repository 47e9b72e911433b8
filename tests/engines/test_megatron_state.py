"""How megatron-core's groups end."""

import random

import pytest
import torch.distributed as dist


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
