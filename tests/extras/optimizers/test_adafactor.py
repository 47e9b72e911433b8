"""`optimizer.name: adafactor`: its rule is transformers', and its state moves between layouts;
every layout trains with it in tests/engines/test_pairs.py."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as Transformers

from tests.engines.owner_cases import EXPERTS, check_reshaped, zeros
from toolkit.checkpoint.verify import coverage_problems
from toolkit.extras.optimizers.adafactor import ADAFACTOR, AdafactorSection
from toolkit.extras.optimizers.adafactor_update import Adafactor
from toolkit.recipe.schema import OptimizerSection

OPTIMIZER = {"name": "adafactor", "learning_rate": 1e-3}
OTHER = {"decay": 0.6, "eps": 1e-12, "clip": 2.0}


@pytest.mark.parametrize("shape", [(7, 5), (9,)])
def test_the_rule(shape: tuple[int, ...]) -> None:
    own = AdafactorSection(**OTHER)
    rule = Adafactor(OptimizerSection(name="adafactor", learning_rate=1.0, adafactor=own))
    states = zeros(ADAFACTOR, shape)
    weight = nn.Parameter(torch.zeros(shape))
    theirs = Transformers(
        [weight], lr=1.0, scale_parameter=False, relative_step=False, decay_rate=-0.6,
        eps=(1e-12, 0.0), clip_threshold=2.0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 5):
        weight.data.zero_()
        weight.grad = torch.randn(shape, generator=generator) * step**3
        theirs.step()
        update = rule.update(weight.grad, states, step)
        assert torch.allclose(update, -weight, rtol=1e-5)
        assert update.square().mean().sqrt() <= 2.0 + 1e-5
    for name, state in states.items():
        assert torch.allclose(state, theirs.state[weight][name], rtol=1e-6), name


@pytest.mark.slow
def test_reshape(tmp_path: Path) -> None:
    state = check_reshaped(tmp_path, OPTIMIZER)
    assert state.quantities("model.layers.1.mlp.up_proj.weight") == [
        "weight", "exp_avg_sq_row", "exp_avg_sq_col",
    ]  # fmt: skip
    assert state.quantities("model.norm.weight") == ["weight", "exp_avg_sq"]
    assert [*coverage_problems(state, optimizer="adafactor")] == []
    assert "which adamw does not keep" in next(coverage_problems(state))


@pytest.mark.soak
def test_reshape_experts(tmp_path: Path) -> None:
    check_reshaped(tmp_path, OPTIMIZER, EXPERTS)
