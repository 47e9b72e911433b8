"""Parts of a veto that take a GPU (fp16) or another DeepSpeed to be seen in a whole step."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from toolkit.engines.deepspeed.veto import Veto
from toolkit.errors import RunFailed


def test_a_refused_loss_leaves_the_loss_scale_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.fp16 import loss_scaler
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)  # it tells of an overflow
    scaler = DynamicLossScaler(
        init_scale=2.0**16,
        scale_window=1000,
        min_scale=1,
        delayed_shift=1,
        consecutive_hysteresis=False,
    )
    optimizer, before = SimpleNamespace(loss_scaler=scaler), dict(vars(scaler))
    veto = Veto(torch.nn.LayerNorm(4))
    for loss, refused in ((9.0, True), (1.0, False)):
        veto.judge(partial(torch.tensor, [loss]), 2.0, optimizer)
        scaler.update_scale(True)  # as DeepSpeed does for gradients that are not finite
        veto.end_step(refused, False, optimizer)
        assert (vars(scaler) == before) == refused
    assert scaler.cur_scale == 2.0**15


@pytest.mark.parametrize(
    ("loss", "limit"), [(math.nan, math.inf), (math.inf, math.inf), (3.0, 2.0)]
)
def test_only_the_last_backward_is_spoiled(loss: float, limit: float) -> None:
    norm = torch.nn.LayerNorm(4)
    veto, optimizer = Veto(norm), SimpleNamespace()
    norm(torch.ones(2, 4)).sum().backward()
    assert norm.weight.grad is not None
    assert norm.weight.grad.tolist() == [0.0] * 4
    joint = partial(torch.tensor, [loss], dtype=torch.float64)
    veto.judge(joint, limit, optimizer)
    norm(torch.ones(2, 4)).sum().backward()
    assert norm.weight.grad.isnan().all()


def test_a_deepspeed_that_does_the_step_nevertheless_is_refused() -> None:
    veto = Veto(torch.nn.LayerNorm(4))
    with pytest.raises(RunFailed, match="does steps whose gradients are not finite"):
        veto.end_step(True, True, SimpleNamespace())
