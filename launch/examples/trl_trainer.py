"""Post-train with TRL's SFTTrainer or DPOTrainer, with a recipe's parallelism and adapters.

    dmt render RECIPE --to accelerate > accelerate.yaml
    accelerate launch --config_file accelerate.yaml \\
        launch/examples/trl_trainer.py RECIPE --output-dir out [--set KEY=VALUE …]

The recipe says `model: {hub: FOLDER_OR_HUB_ID, init: pretrained}`, and by `training.objective`
(`sft` or `dpo`) which trainer it is. Engine, ZeRO stage, batch, optimizer, adapters and the
settings of the objective are the recipe's. TRL gets the rows of `data.train` as they are, in
its own order, and masks them: `loss_on: assistant` needs a template with generation blocks.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from toolkit.accelerate import training_arguments
from toolkit.data.files import cache_folder
from toolkit.data.records import open_records
from toolkit.data.tokenizers import load_tokenizer, stated_template
from toolkit.engines.distributed import end_process
from toolkit.errors import DmtError, PlanError
from toolkit.intake.load import load_recipe
from toolkit.models.adapters.huggingface import peft_config
from toolkit.models.adapters.lora import Lora
from toolkit.models.huggingface import build_config, snapshot_folder
from toolkit.recipe.schema import DpoSection, Recipe

TRAINERS = {"sft": (SFTTrainer, SFTConfig), "dpo": (DPOTrainer, DPOConfig)}


def make_trainer(recipe: Recipe, **more: Any) -> SFTTrainer | DPOTrainer:
    """The trainer of the recipe's objective; `more` are arguments of its config."""
    data = recipe.data.train
    trainer, config_class = TRAINERS[recipe.training.objective]
    config = build_config(recipe.model)  # the recipe's dropout: none unless it says so
    lora = recipe.adapter and Lora.of(recipe.adapter, config.to_dict())
    arguments = training_arguments(
        recipe, config_class=config_class, **objective_settings(recipe), **more
    )
    tokenizer = load_tokenizer(recipe.data.tokenizer, recipe.data.tokenizer_revision)
    if recipe.data.chat_template is not None:
        tokenizer.chat_template = stated_template(recipe.data.chat_template)
    set_seed(recipe.training.seed)  # the adapters begin with the same values on all ranks
    # After the arguments: they let ZeRO-3 shard a model while it is loaded.
    model = AutoModelForCausalLM.from_pretrained(
        snapshot_folder(recipe.model.hub, recipe.model.revision),
        config=config,
        dtype=torch.float32,
    )
    rows = open_records(data, cache_folder())
    return trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([row for _, row in rows]),
        processing_class=tokenizer,
        peft_config=lora and peft_config(lora, recipe.model.hub),
    )


def objective_settings(recipe: Recipe) -> dict[str, Any]:
    """The recipe's words for what is trained, in TRL's."""
    if recipe.training.objective == "sft":
        return {"assistant_only_loss": recipe.data.train.loss_on == "assistant"}
    settings = recipe.dpo or DpoSection()
    return {"beta": settings.beta, "loss_type": [settings.loss]}


def check(recipe: Recipe) -> None:
    """Raise PlanError for what this script would not do as the recipe says."""
    data, objective = recipe.data, recipe.training.objective
    wrong = {
        f"training.objective: {objective}": (objective not in TRAINERS, "sft or dpo"),
        f"model.init: {recipe.model.init}": (recipe.model.init != "pretrained", "pretrained"),
        "data.train.columns": (bool(getattr(data.train, "columns", None)), "{}"),
        "data.train: a list": (isinstance(data.train, tuple), "one source"),
        "model.freeze": (bool(recipe.model.freeze), "null"),
        f"data.packing: {data.packing}": (data.packing != "none", "none"),
        # TRL's loss `sigmoid` ignores its own label_smoothing.
        "dpo.label_smoothing": (bool(recipe.dpo and recipe.dpo.label_smoothing), "0"),
        "dpo.sft_weight": (bool(recipe.dpo and recipe.dpo.sft_weight), "0"),
        "data.train.loss_on": (
            getattr(data.train, "loss_on", "all") not in ("assistant", "all"),
            "assistant or all",
        ),
    }
    for found, (refused, allowed) in wrong.items():
        if refused:
            raise PlanError(
                f"{recipe.name}: this script does not know {found}",
                fix=f"set {found.partition(':')[0]} to {allowed}, or train with `dmt launch`",
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("recipe", type=Path, help="recipe YAML")
    parser.add_argument("--output-dir", type=Path, default=Path("trl-output"))
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE"
    )
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        check(recipe)
        trainer = make_trainer(
            recipe, output_dir=str(arguments.output_dir), save_strategy="no", report_to=[]
        )
    except DmtError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    trainer.train()
    trainer.save_model()  # on every rank: the shards are collected
    return 0


if __name__ == "__main__":
    # Not sys.exit: on CPUs, gloo's threads now and then abort a Python that shuts down.
    end_process(main())
