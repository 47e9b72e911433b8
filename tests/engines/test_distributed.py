"""What every rank does before an engine is built."""

import resource
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch

from tests.forked import ForkedRanks, run_ranks
from toolkit.batch import MicroBatch
from toolkit.engines.distributed import join, leave, to_device
from toolkit.errors import DataError


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
