"""Fine-tune with transformers' Trainer, every setting taken from a recipe.

    dmt render RECIPE --to accelerate > accelerate.yaml
    accelerate launch --config_file accelerate.yaml \\
        launch/examples/hf_trainer.py RECIPE --output-dir out [--set KEY=VALUE …]

The recipe says `model: {hub: FOLDER_OR_HUB_ID, init: pretrained}`. Engine and ZeRO stage are
the recipe's, and the losses are those of `dmt launch RECIPE`.
"""

import argparse
import sys
from pathlib import Path

import torch
from recipe_samples import RecipeSamples
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from toolkit.accelerate import training_arguments
from toolkit.engines.distributed import end_process
from toolkit.errors import DmtError, PlanError
from toolkit.intake.load import load_recipe
from toolkit.models.huggingface import build_config, snapshot_folder
from toolkit.recipe.schema import Recipe
from toolkit.train.schedule import learning_rate


class PrintLoss(TrainerCallback):
    """Trainer rounds the losses that it prints to four digits; these have all."""

    def on_log(self, _arguments, state, _control, logs, **_) -> None:
        if state.is_world_process_zero and "loss" in logs:
            print(f"step {state.global_step}/{state.max_steps}  loss {logs['loss']:.9f}")


class RecipeTrainer(Trainer):
    """Trainer with the recipe's learning rates: transformers' warm-ups begin a step late."""

    def __init__(self, recipe: Recipe, **arguments) -> None:
        self.recipe = recipe
        super().__init__(**arguments)

    def create_scheduler(self, num_training_steps, optimizer=None):
        peak, last = self.recipe.optimizer.learning_rate, num_training_steps - 1

        def factor(step: int) -> float:  # also asked for after the last step
            rate = learning_rate(min(step, last), last + 1, peak, self.recipe.schedule)
            return rate / peak

        if self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, factor)
        return self.lr_scheduler


def train(recipe: Recipe, output_dir: Path) -> None:
    samples = RecipeSamples(recipe)
    arguments = training_arguments(
        recipe,
        max_steps=samples.steps,
        train_sampling_strategy="sequential",  # the samples are in the recipe's order
        output_dir=str(output_dir),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    # After the arguments: they let ZeRO-3 shard a model while it is loaded.
    model = AutoModelForCausalLM.from_pretrained(
        snapshot_folder(recipe.model.hub, recipe.model.revision),
        config=build_config(recipe.model),  # the recipe's dropout: none unless it says so
        dtype=torch.float32,
    )
    trainer = RecipeTrainer(
        recipe,
        model=model,
        args=arguments,
        train_dataset=samples,
        callbacks=[PrintLoss()],
    )
    trainer.train()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", type=Path, help="recipe YAML")
    parser.add_argument("--output-dir", type=Path, default=Path("trainer-output"))
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
        train(recipe, arguments.output_dir)
    except DmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    # Not sys.exit: on CPUs, gloo's threads now and then abort a Python that shuts down.
    end_process(main())
