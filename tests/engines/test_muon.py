"""`optimizer.name: muon`: its rule is torch's. Every layout trains with it in test_pairs.py."""

import pytest
import torch
from torch import nn

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
