"""`optimizer.name: muon`: its rule is torch's. Every layout trains with it in test_pairs.py."""

import pytest
import torch
from torch import nn

from tests.engines.pairs import DENSE
from toolkit.checkpoint.shards import whole_block
from toolkit.engines import owners
from toolkit.engines.muon import Muon, newton_schulz
from toolkit.recipe.schema import OptimizerSection


@pytest.mark.parametrize("shape", [(7, 5), (5, 7), (128, 32)])
def test_the_iteration_is_torchs_to_the_bit(shape: tuple[int, int]) -> None:
    """Which torch itself has under a private name, with other arguments in other versions."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = gradient
    settings = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    torch.optim.Muon([weight], **settings, adjust_lr_fn="match_rms_adamw").step()
    rate = Muon(OptimizerSection(name="muon", learning_rate=1.0))
    expected = torch.zeros(shape).add_(newton_schulz(gradient), alpha=-rate.rate(shape))
    assert torch.equal(weight, expected)


def test_matrices_are_exchanged_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of test_pairs.py's models fills a round at the limit that is set there."""
    shape = DENSE["intermediate_size"], DENSE["hidden_size"]
    held = {name: owners._Tensor(shape, [(0, whole_block(name, shape))], 0) for name in "abc"}
    assert [*map(list, owners._rounds(held, 1))] == [["a", "b", "c"]]
    monkeypatch.setattr(owners, "EXCHANGED_AT_ONCE", 20_000)
    assert [*map(list, owners._rounds(held, 1))] == [["a"], ["b"], ["c"]]
