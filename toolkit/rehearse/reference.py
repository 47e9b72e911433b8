"""The reference of every layout: only transformers, PEFT and torch, one process, fp32.

    python -m toolkit.rehearse.reference RUN_DIR

Whole global batches, no engine, nothing sharded. Only the initial weights come from the
toolkit, because every layout starts from them.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from toolkit.batch import MicroBatch
from toolkit.intake.load import load_recipe
from toolkit.models import fp8
from toolkit.models import huggingface as hf
from toolkit.models.adapters.huggingface import inject
from toolkit.models.adapters.lora import lora_of
from toolkit.models.adapters.weights import first_weights
from toolkit.models.frozen import freeze, matching
from toolkit.models.routers import is_router, outcome
from toolkit.models.types import SCORES
from toolkit.models.weights import is_correction_bias
from toolkit.optimizers.base import Trained
from toolkit.recipe.schema import OptimizerSection, Recipe
from toolkit.registry import load
from toolkit.rehearse.batches import document_starts, global_batches
from toolkit.rehearse.comparison import write_step
from toolkit.rehearse.losses import balance_terms, mean_loss, row_log_probs, tokens_of
from toolkit.run.directory import RunDirectory


def plain_run(
    recipe: Recipe, batches: Sequence[MicroBatch] | None = None
) -> Iterator[tuple[float, float]]:
    """Train the recipe's model. Loss and gradient norm of each step.

    `batches`: see `small_run`.
    """
    config = hf.build_config(recipe.model)
    model = hf.empty_model(config, torch.device("cpu"))
    inject(model, lora_of(recipe.adapter, config.to_dict()))
    hf.fill(model, first_weights(recipe, config))
    names = hf.checkpoint_shapes(config)
    everything = ("*",) if recipe.adapter is not None else recipe.model.freeze
    freeze(hf.tensors_of(model), matching(everything, names))
    fp8.convert(model, recipe.kernels.fp8)
    model.train()
    optimizers = _optimizers(model, recipe.optimizer)
    batches = batches or global_batches(recipe, config.vocab_size)
    forward = partial(_logits, recipe)
    balance = recipe.model.balance
    routers = _watched_routers(model) if balance is not None else []
    with torch.no_grad():
        first = [
            row_log_probs(forward(step, model, batch), batch.labels)
            for step, batch in enumerate(batches)
        ]
    for step, batch in enumerate(batches):
        for seen in routers:
            seen.clear()
        logits = forward(step, model, batch)
        loss = mean_loss(recipe, logits, batch.labels, first[step])
        model.zero_grad()
        whole = loss + _balance(recipe, config.model_type, routers, batch.labels)
        whole.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        # Of all together, summed in fp64.
        norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt().item()
        if recipe.optimizer.clip_grad_norm is not None:
            limit = recipe.optimizer.clip_grad_norm
            nn.utils.clip_grads_with_norm_(model.parameters(), limit, torch.tensor(norm))
        for optimizer in optimizers:
            optimizer.step()
        if balance is not None and balance.kind == "bias":
            _move_biases(model, balance.bias_update, routers, batch.labels)
        yield loss.item(), norm


def _logits(recipe: Recipe, step: int, model: nn.Module, batch: MicroBatch) -> Tensor:
    """Logits [rows, sequence, vocabulary] of global batch `step`.

    If the recipe isolates documents, each has a separate forward pass.
    """
    inputs = batch.input_ids
    if not recipe.data.isolates:
        placed: dict[str, Tensor] = {}
        if batch.positions is not None:  # without a mask, restarts would isolate documents
            placed = {
                "position_ids": batch.positions,
                "attention_mask": torch.ones_like(inputs),
            }
        whole: Tensor = model(inputs, use_cache=False, **placed).logits
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
        router.register_forward_hook(
            lambda module, _given, out, to=outputs: to.append(outcome(module, out))
        )
        found.append(outputs)
    return found


def _balance(
    recipe: Recipe, model_type: str, routers: list[list[tuple[Tensor, ...]]], labels: Tensor
) -> Tensor:
    """The balancing loss of `model.balance`, from the outputs of one step's forward passes."""
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
    """Update every correction bias by the choices of the global batch."""
    real = torch.cat([torch.arange(len(row)) < tokens_of(row) for row in labels])
    biases = [bias for name, bias in model.named_buffers() if is_correction_bias(name)]
    for bias, outputs in zip(biases, routers, strict=True):
        indices = torch.cat([found for _, _, found in outputs])[real]
        counts = indices.flatten().bincount(minlength=len(bias)).double()
        bias += step * torch.sign(counts.mean() - counts).float()


def _optimizers(model: nn.Module, settings: OptimizerSection) -> list[torch.optim.Optimizer]:
    """The plain optimizers of `settings`, with weight decay for matrices but not for norms and
    biases. Every parameter has the multipliers of the first group of `optimizer.groups` that
    names it."""
    embeddings = {one.weight for one in model.modules() if isinstance(one, nn.Embedding)}
    trained = []
    for parameter, tensors in hf.tensors_of(model):
        if not parameter.requires_grad:
            continue
        rate, decay, name = settings.learning_rate, settings.weight_decay, min(tensors)
        for group in reversed(settings.groups):
            if any(fnmatchcase(name, pattern) for pattern in group.parameters):
                rate = settings.learning_rate * group.lr_mult
                decay = settings.weight_decay * group.wd_mult
        vector = parameter.ndim == 1 or name.endswith("bias")  # of experts: stacked
        pieces = [parameter]
        stacked = parameter.ndim == 3 or (vector and parameter.ndim == 2)
        if stacked and settings.kind.whole is not None:  # experts, or a convolution
            halves = 2 if any("gate_proj" in one for one in tensors) else 1
            pieces = _parts(parameter, partial(_tensors, name=name, halves=halves))
        member = {"params": pieces, "lr": rate, "weight_decay": 0.0 if vector else decay}
        trained.append(Trained(name, member, vector, parameter in embeddings))
    optimizers: list[torch.optim.Optimizer] = load(settings.kind.reference)(settings, trained)
    return optimizers


def adamw(
    settings: OptimizerSection, parameters: Sequence[Trained]
) -> list[torch.optim.Optimizer]:
    """torch's own."""
    groups = [parameter.group for parameter in parameters]
    return [torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)]


def _tensors(stack: Tensor, name: str, halves: int) -> list[Tensor]:
    """The matrices of a convolution, or of experts."""
    if "conv" in name:
        return [stack.flatten(1)]
    return [part for expert in stack for part in expert.chunk(halves)]


def _parts(stack: nn.Parameter, split: Callable[[Tensor], list[Tensor]]) -> list[nn.Parameter]:
    """The tensors of the checkpoint that transformers keeps in one parameter: its memory and,
    once it has a gradient, that of its gradient."""
    matrices = [nn.Parameter(part) for part in split(stack.detach())]

    def share(whole: Tensor) -> None:
        assert whole.grad is not None
        for matrix, gradient in zip(matrices, split(whole.grad), strict=True):
            matrix.grad = gradient

    stack.register_post_accumulate_grad_hook(share)  # type: ignore[no-untyped-call]
    return matrices


def main() -> None:
    """Train as the run directory states."""
    run = RunDirectory(Path(sys.argv[1]))
    for loss, norm in plain_run(load_recipe(run.recipe)):
        write_step(run.path, loss, norm)


if __name__ == "__main__":
    main()
