"""What every layout is compared with: transformers, PEFT and torch alone, one process, fp32.

    python -m toolkit.rehearse.reference RUN_DIR

Whole global batches, no engine, nothing sharded. Only the initial weights come from the
toolkit, because every layout starts from them.
"""

import sys
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.adapters.huggingface import inject
from toolkit.adapters.lora import lora_of
from toolkit.adapters.weights import first_weights
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf
from toolkit.models.frozen import matching
from toolkit.models.routers import SCORES, is_router
from toolkit.models.weights import is_correction_bias
from toolkit.recipe.schema import OptimizerSection, Recipe
from toolkit.rehearse.batches import document_starts, global_batch
from toolkit.rehearse.losses import balance_terms, mean_loss, row_log_probs, tokens_of
from toolkit.rehearse.record import write_step
from toolkit.run.directory import RunDirectory


def train(recipe: Recipe, folder: Path) -> None:
    """Train the recipe's model and record each step under `folder`."""
    config = hf.build_config(recipe.model)
    model = hf.empty_model(config, torch.device("cpu"))
    inject(model, lora_of(recipe.adapter, config.to_dict()))
    hf.fill(model, first_weights(recipe, config))
    names = hf.checkpoint_shapes(config)
    everything = ("*",) if recipe.adapter is not None else recipe.model.freeze
    hf.freeze(model, matching(everything, names))
    model.train()
    optimizer = _adamw(model, recipe.optimizer)
    steps = recipe.training.steps
    assert steps is not None, "a rehearsal's length is stated in steps"
    batches = [global_batch(recipe.training, config.vocab_size, step) for step in range(steps)]
    forward = partial(_logits, recipe)
    routers = _watched_routers(model) if recipe.model.balance is not None else []
    with torch.no_grad():
        first = [
            row_log_probs(forward(step, model, inputs), labels)
            for step, (inputs, labels) in enumerate(batches)
        ]
    for step, (inputs, labels) in enumerate(batches):
        for seen in routers:
            seen.clear()
        logits = forward(step, model, inputs)
        loss = mean_loss(recipe, logits, labels, first[step])
        optimizer.zero_grad()
        whole = loss + _balance(recipe, config.model_type, routers, labels)
        whole.backward()  # type: ignore[no-untyped-call]
        norm = _gradient_norm(model)
        if recipe.optimizer.clip_grad_norm is not None:
            limit = recipe.optimizer.clip_grad_norm
            nn.utils.clip_grads_with_norm_(model.parameters(), limit, torch.tensor(norm))
        optimizer.step()
        if recipe.model.balance is not None and recipe.model.balance.kind == "bias":
            _move_biases(model, recipe.model.balance.bias_update, routers, labels)
        write_step(folder, loss.item(), norm)


def _logits(recipe: Recipe, step: int, model: nn.Module, inputs: Tensor) -> Tensor:
    """Logits [rows, sequence, vocabulary] of global batch `step`.

    Where the recipe isolates documents, each is in a forward pass of its own.
    """
    if not recipe.data.isolates:
        whole: Tensor = model(inputs, use_cache=False).logits
        return whole
    rows = [
        torch.cat([model(part[None], use_cache=False).logits[0] for part in documents])
        for documents in (
            row.tensor_split(first[1:])
            for row, first in zip(inputs, document_starts(recipe.training, step), strict=True)
        )
    ]
    return torch.stack(rows)


def _watched_routers(model: nn.Module) -> list[list[tuple[Tensor, ...]]]:
    """For each layer with experts, a list to which its router's outputs are added."""
    found: list[list[tuple[Tensor, ...]]] = []
    for router in (part for part in model.modules() if is_router(part)):
        outputs: list[tuple[Tensor, ...]] = []
        router.register_forward_hook(lambda _module, _inputs, out, to=outputs: to.append(out))
        found.append(outputs)
    return found


def _balance(
    recipe: Recipe, model_type: str, routers: list[list[tuple[Tensor, ...]]], labels: Tensor
) -> Tensor:
    """What `model.balance` adds to the loss, from the outputs of one step's forward passes."""
    total = torch.zeros(())
    for outputs in routers:
        logits, _, indices = (torch.cat(parts) for parts in zip(*outputs, strict=True))
        assert recipe.model.balance is not None
        sigmoid = SCORES[model_type] == "sigmoid"
        total = total + balance_terms(recipe.model.balance, sigmoid, logits, indices, labels)
    return total


@torch.no_grad()
def _move_biases(
    model: nn.Module, step: float, routers: list[list[tuple[Tensor, ...]]], labels: Tensor
) -> None:
    """Move every correction bias by the choices of the global batch."""
    real = torch.cat([torch.arange(len(row)) < tokens_of(row) for row in labels])
    biases = [bias for name, bias in model.named_buffers() if is_correction_bias(name)]
    for bias, outputs in zip(biases, routers, strict=True):
        indices = torch.cat([found for _, _, found in outputs])[real]
        counts = indices.flatten().bincount(minlength=len(bias)).double()
        bias += step * torch.sign(counts.mean() - counts).float()


def _adamw(model: nn.Module, settings: OptimizerSection) -> torch.optim.AdamW:
    """AdamW, with weight decay for matrices but not for norms and biases, and every parameter
    with the multipliers of the first group of `optimizer.groups` that names it."""
    found: list[dict[str, Any]] = []
    for parameter, tensors in hf.tensors_of(model):
        rate, decay = settings.learning_rate, settings.weight_decay
        for group in reversed(settings.groups):
            if any(fnmatchcase(min(tensors), pattern) for pattern in group.parameters):
                rate = settings.learning_rate * group.lr_mult
                decay = settings.weight_decay * group.wd_mult
        if parameter.ndim == 1 or min(tensors).endswith("bias"):  # of experts: stacked
            decay = 0.0
        found.append({"params": [parameter], "lr": rate, "weight_decay": decay})
    return torch.optim.AdamW(found, betas=settings.betas, eps=settings.eps)


def _gradient_norm(model: nn.Module) -> float:
    """L2 norm of all gradients together, summed in fp64."""
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    return torch.stack(squares).sum().sqrt().item()


def main() -> None:
    """Train as the run directory states."""
    run = RunDirectory(Path(sys.argv[1]))
    train(load_recipe(run.recipe), run.path)


if __name__ == "__main__":
    main()
