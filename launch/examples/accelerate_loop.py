"""Fine-tune a model in a loop of your own, under Accelerate, with a recipe's parallelism.

    dmt render RECIPE --to accelerate > accelerate.yaml
    accelerate launch --config_file accelerate.yaml \\
        launch/examples/accelerate_loop.py RECIPE [--set KEY=VALUE …]

The recipe says `model: {hub: FOLDER_OR_HUB_ID, init: pretrained}`. Engine and ZeRO stage are
the recipe's; the loop is the same for all of them, and so are the losses: those of
`dmt launch RECIPE`.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from recipe_samples import RecipeSamples
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import toolkit.accelerate
from toolkit.engines.adamw import parameter_groups, set_learning_rate
from toolkit.engines.distributed import end_process
from toolkit.errors import DmtError, PlanError
from toolkit.intake.load import load_recipe
from toolkit.models.huggingface import build_config, snapshot_folder, tensors_of
from toolkit.recipe.schema import Recipe
from toolkit.train.schedule import learning_rate


class LanguageModel(nn.Module):
    """A model class of your own: it answers with the summed loss of its tokens."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.decoder = AutoModelForCausalLM.from_pretrained(
            snapshot_folder(recipe.model.hub, recipe.model.revision),
            config=build_config(recipe.model),  # the recipe's dropout: none unless it says so
            dtype=torch.float32,
        )
        # By these names FSDP finds the layers that it shards one by one.
        self._no_split_modules = self.decoder._no_split_modules

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.decoder(input_ids=input_ids, use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def train(accelerator: Accelerator, recipe: Recipe) -> None:
    settings = recipe.optimizer
    samples = RecipeSamples(recipe)  # in order: not to be shuffled
    loader = DataLoader(samples, batch_size=accelerator.plan.layout.micro_batch)
    model = LanguageModel(recipe)
    if accelerator.plan.layout.recompute == "full" and not accelerator.is_fsdp2:
        model.decoder.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(
        # No weight decay for norms and biases; the recipe's `optimizer.groups`.
        parameter_groups(tensors_of(model.decoder), settings),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    micro_batches = iter(loader)
    for step in range(samples.steps):
        rate = learning_rate(step, samples.steps, settings.learning_rate, recipe.schedule)
        set_learning_rate(optimizer, rate)
        batches = list(islice(micro_batches, accelerator.gradient_accumulation_steps))
        loss = train_step(accelerator, model, optimizer, batches, settings.clip_grad_norm)
        accelerator.print(f"step {step + 1}/{samples.steps}  loss {loss:.9f}", flush=True)


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, Tensor]],
    clip: float | None,
) -> float:
    """One optimizer step; the mean loss over all tokens of the global batch."""
    tokens = sum((batch["shift_labels"] != -100).sum() for batch in batches)
    tokens = accelerator.reduce(tokens, "sum").clamp(min=1)
    # Accelerate averages over micro batches and processes; the loss is a sum over both.
    averaged_over = accelerator.gradient_accumulation_steps * accelerator.num_processes
    total = torch.zeros((), device=accelerator.device)
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(batch["input_ids"], batch["shift_labels"]) / tokens
            accelerator.backward(loss * averaged_over)
            if accelerator.sync_gradients and clip is not None:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.detach()
    return accelerator.reduce(total, "sum").item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", type=Path, help="recipe YAML")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE"
    )
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if recipe.adapter is not None or recipe.model.freeze:
            raise PlanError(
                "this script trains all weights; the recipe has `adapter` or `model.freeze`",
                fix="remove it, or train with `dmt launch`",
            )
        if recipe.model.init != "pretrained":
            raise PlanError(
                f"{recipe.name} trains from random weights; this script fine-tunes",
                fix="--set model.hub=FOLDER_OR_HUB_ID --set model.init=pretrained",
            )
        accelerator = toolkit.accelerate.prepare(recipe)
        train(accelerator, recipe)
    except DmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    accelerator.end_training()
    return 0


if __name__ == "__main__":
    # Not sys.exit: on CPUs, gloo's threads now and then abort a Python that shuts down.
    end_process(main())
