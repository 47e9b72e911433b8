"""`optimizer.name: adamw_8bit`: its rule is bitsandbytes'. Every layout trains with it in
tests/engines/test_pairs.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bitsandbytes.optim import AdamW8bit as Theirs
from torch import nn

from toolkit.errors import BackendUnavailable
from toolkit.extras.optimizers.adamw_8bit import ADAMW_8BIT
from toolkit.extras.optimizers.adamw_8bit_update import AdamW8bit
from toolkit.recipe.schema import OptimizerSection


@pytest.mark.parametrize("shape", [(65, 64), (4500,), (7, 5)])
def test_the_rule(shape: tuple[int, ...]) -> None:
    """Codes and scales to the bit; also of a last block that is shorter."""
    rule = AdamW8bit(OptimizerSection(name="adamw_8bit", learning_rate=1.0))
    assert ADAMW_8BIT.whole is not None
    states = {
        name: torch.zeros(state.shape(shape), dtype=getattr(torch, state.dtype))
        for name, state in ADAMW_8BIT.whole.states(shape).items()
    }
    weight = nn.Parameter(torch.zeros(shape))
    theirs = Theirs([weight], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 5):
        weight.data.zero_()
        weight.grad = torch.randn(shape, generator=generator) * step**3
        theirs.step()
        assert torch.equal(rule.update(weight.grad, states, step), -weight)
    state = theirs.state[weight]
    names = ["state1", "state2", "absmax1", "absmax2"][: len(states)]
    for ours, name in zip(states.values(), names, strict=True):
        assert ours.dtype == state[name].dtype
        assert torch.equal(ours, state[name]), name
    assert (len(names) == 4) == (len(torch.empty(shape).flatten()) >= 4096)


@pytest.mark.slow
def test_without_bitsandbytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error with a fix, no traceback."""
    (tmp_path / "bitsandbytes.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', Path.cwd())}")
    recipe = Path("recipes/tiny/llama-adamw-8bit.yaml").resolve()
    told = subprocess.run(
        [sys.executable, "-m", "toolkit.cli.main", "launch", recipe],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert told.returncode == BackendUnavailable.exit_code
    assert "bitsandbytes cannot be imported (not here)" in told.stderr
    assert "pip install 'bitsandbytes>=" in told.stderr
    assert "Traceback" not in told.stderr + told.stdout
