"""What a rank of test_muon.py does with an exchange by itself."""

from typing import Any

import torch

from toolkit.checkpoint.shards import block_numel, stored_values
from toolkit.engines import owners
from toolkit.engines.distributed import join, leave
from toolkit.models.families.tensors import Block
from toolkit.recipe.schema import OptimizerSection

MATRICES = {"split": (6, 10), "turned": (8, 4), "copied": (5, 5), "one": (3, 7)}
HELD = {
    0: [
        Block("split", (0, 2), (0, 10), transposed=False),
        Block("split", (2, 3), (0, 4), transposed=False),
        Block("turned", (0, 2), (0, 8), transposed=True),
        Block("copied", (0, 5), (0, 5), transposed=False),
    ],
    1: [
        Block("copied", (0, 5), (0, 5), transposed=False),
        Block("split", (2, 3), (4, 10), transposed=False),
        Block("split", (3, 6), (0, 10), transposed=False),
        Block("turned", (2, 4), (0, 8), transposed=True),
        Block("one", (0, 3), (0, 7), transposed=False),
    ],
}


def orthogonalized() -> dict[str, Any]:
    """The largest difference to torch's Muon for each matrix, on this rank."""
    ranks = join()
    wholes = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        for name, shape in MATRICES.items()
    }
    owners.EXCHANGED_AT_ONCE = 100  # type: ignore[attr-defined]
    blocks = HELD[ranks.rank]
    held = {}
    for block in blocks:
        stored = block.stored
        held[stored] = stored_values(block, 0, torch.empty(block_numel(block)))
        held[stored].copy_(_cut(wholes, stored))
    settings = OptimizerSection(name="muon", learning_rate=1.0)
    exchange = owners.Exchange([*held], settings, ranks.device)
    exchange.run(held, 1)
    found = dict.fromkeys(MATRICES, 0.0)
    expected = {name: by_torch(whole) for name, whole in wholes.items()}
    for block, values in held.items():
        difference = (values - _cut(expected, block)).abs().max().item()
        found[block.tensor] = max(found[block.tensor], difference)
    leave()
    return {**found, "rounds": len(exchange.rounds)}


def by_torch(gradient: torch.Tensor) -> torch.Tensor:
    """The step of torch's Muon from 0, without momentum, at a rate of 1."""
    weight = torch.nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient
    torch.optim.Muon(
        [weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn=None
    ).step()
    rows, columns = gradient.shape
    return -weight.detach() / max(1, rows / columns) ** 0.5


def _cut(wholes: dict[str, torch.Tensor], block: Block) -> torch.Tensor:
    assert block.columns is not None
    return wholes[block.tensor][slice(*block.rows), slice(*block.columns)]
