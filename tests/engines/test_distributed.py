"""What every rank does before an engine is built."""

import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from toolkit.batch import MicroBatch
from toolkit.engines.distributed import to_device
from toolkit.errors import DataError
from toolkit.launchers.base import free_port


def test_a_rank_may_open_as_many_files_as_the_machine_allows() -> None:
    """gloo has a socket to every other rank: 1,024 ranks need more than the usual limit."""
    code = (
        "import resource as r; _, hard = r.getrlimit(r.RLIMIT_NOFILE)\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, hard))\n"
        "from toolkit.engines.distributed import join, leave; join(); leave()\n"
        "assert r.getrlimit(r.RLIMIT_NOFILE) == (hard, hard)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


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


def test_the_store_of_local_ranks_listens_on_loopback_only() -> None:
    """PyTorch's own listens at every address of the machine, for anybody."""
    place = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    code = (
        "import psutil; from toolkit.engines.distributed import join, leave; join()\n"
        "found = psutil.Process().net_connections('tcp')\n"
        "print(*{one.laddr.ip for one in found if one.status == 'LISTEN'}); leave()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **place, "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "127.0.0.1"


def test_an_ended_process_leaves_no_temporary_folder() -> None:
    code = (
        "import tempfile; made = tempfile.TemporaryDirectory(); print(made.name)\n"
        "from toolkit.engines.distributed import end_process; end_process(0)"
    )
    made = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    assert made and not Path(made).exists()
