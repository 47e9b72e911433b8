"""One process that is all ranks, and a small state to save."""

from collections.abc import Iterator

import pytest
import torch

from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.shards import QUANTITIES, StateShard, whole_block
from toolkit.engines.distributed import join, leave
from toolkit.layout import Layout

MANIFEST = Manifest(
    step=1,
    consumed_samples=8,
    optimizer_steps=1,
    loss_scale=None,
    recent_losses=(2.5,),
    consumed_tokens=500,
    data_fingerprint="abc",
    engine="ddp",
    model="hf",
    layout=Layout(dp=2),
    recipe={"training": {"precision": "fp32"}},
    versions={"dmt": "0"},
)
SHAPES = {"embedding": (12, 4), "norm": (7,)}


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    join()
    yield
    leave()


def make_state(seed: int = 0) -> list[StateShard]:
    """Random weights and moments of two tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [
        StateShard(
            [whole_block(name, shape)],
            {quantity: torch.randn(shape, generator=generator) for quantity in QUANTITIES},
            saved_here=True,
        )
        for name, shape in SHAPES.items()
    ]
