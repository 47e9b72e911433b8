"""How an imported checkpoint goes on, in plain transformers and torch."""

from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM

from tests.e2e.deepspeed_saver import FURTHER, loss_of
from toolkit.accelerate.samples import TrainingSamples
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import whole_quantity
from toolkit.models.huggingface import build_config

TOLERANCE = 1e-5


def whole(state: SavedState, quantity: str, tensor: str) -> torch.Tensor:
    """A quantity of a tensor, flat."""
    block = whole_quantity(quantity, tensor, state.shapes[tensor])
    return state.read(quantity, block).reshape(-1)


def continued(state: SavedState, recipe: Any, folder: Path) -> list[float]:
    """Losses of plain transformers and torch from the imported state on."""
    samples, manifest = TrainingSamples(recipe), Manifest.read(folder)
    model = AutoModelForCausalLM.from_config(build_config(recipe.model)).float()
    section = recipe.optimizer
    trained = {n: p for n, p in model.named_parameters() if len(state.quantities(n)) > 1}
    groups = [
        {"params": [p], "weight_decay": section.weight_decay if p.dim() > 1 else 0.0}
        for p in trained.values()
    ]
    adamw = torch.optim.AdamW(
        groups, lr=section.learning_rate, betas=section.betas, eps=section.eps
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(whole(state, "weight", name).view_as(parameter))
    for name, parameter in trained.items():
        adamw.state[parameter] = {
            "step": torch.tensor(float(manifest.optimizer_steps)),
            **{m: whole(state, m, name).view_as(parameter) for m in ("exp_avg", "exp_avg_sq")},
        }
    losses = []
    for step in range(FURTHER):
        first = manifest.consumed_samples + step * 8
        loss = loss_of(model, [samples[first + n] for n in range(8)])
        model.zero_grad()
        loss.backward()
        clip_grad_norm_(trained.values(), section.clip_grad_norm)
        adamw.step()
        losses.append(loss.item())
    return losses
