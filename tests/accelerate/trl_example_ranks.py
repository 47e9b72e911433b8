"""What each rank of tests/accelerate/test_trl_example.py does."""

import runpy
import warnings
from pathlib import Path
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.accelerate.examples_worker import ENGINES, EXAMPLES, forget
from tests.accelerate.trl_ranks import SAID, Seen, train_watched
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.intake.load import load_recipe

OBJECTIVES = ("sft", "dpo")
RATE, STEPS, BATCH, LENGTH, BETA, SEED = 1e-2, 4, 8, 192, 0.2, 7
EPS = 1e-5
"""Of AdamW: large enough that an element whose gradient is nearly 0 hardly moves."""


def plain(folder: Path, template: str) -> dict[str, Seen]:
    """TRL in one process, with arguments, model and adapters of a user's own."""
    warnings.simplefilter("ignore")
    common = {
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta2": 0.95,
        "adam_epsilon": EPS,
        "max_grad_norm": 1.0,
        "max_length": LENGTH,
        "seed": SEED,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        **SAID,
    }
    chosen = {
        "sft": (SFTTrainer, SFTConfig, {"assistant_only_loss": True}),
        "dpo": (DPOTrainer, DPOConfig, {"beta": BETA}),
    }
    seen = {}
    for objective, (trainer, config_class, settings) in chosen.items():
        output = str(folder / f"{objective}-plain")
        arguments = config_class(output_dir=output, **settings, **common)
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        rows = str(folder / f"{objective}.jsonl")
        set_seed(SEED)
        seen[objective] = train(
            trainer(
                model=AutoModelForCausalLM.from_pretrained(folder / "start"),
                args=arguments,
                train_dataset=load_dataset("json", data_files=rows, split="train"),
                processing_class=tokenizer,
                peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
            )
        )
    return seen


def sharded(folder: Path) -> dict[str, Seen]:
    """The example, for each objective under every engine."""
    warnings.simplefilter("ignore")
    example = runpy.run_path(str(EXAMPLES / "trl_trainer.py"))
    seen = {}
    for engine, overrides in ENGINES.items():
        for objective in OBJECTIVES:
            recipe = load_recipe(folder / f"{objective}.yaml", overrides)
            example["check"](recipe)
            output = str(folder / f"{objective}-{engine}")
            trainer = example["make_trainer"](recipe, output_dir=output, **SAID)
            seen[f"{objective}-{engine}"] = train(trainer)
            forget()
    return seen


def train(trainer: Any) -> Seen:
    """Train and save."""
    seen = train_watched(trainer)
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    margins = [entry["rewards/margins"] for entry in logged if "rewards/margins" in entry]
    return {**seen, "margins": margins}
