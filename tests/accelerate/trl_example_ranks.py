"""What each rank of tests/accelerate/test_trl_example.py does."""

import runpy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import load_dataset
from peft import LoraConfig
from torch.nn import Module
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from tests.accelerate.examples_worker import ENGINES, EXAMPLES, forget
from toolkit.accelerate import training_arguments
from toolkit.data.tokenizers import byte_tokenizer
from toolkit.intake.load import load_recipe

Seen = dict[str, Any]
OBJECTIVES = ("sft", "dpo")
SHARDED = ("zero2", "zero3")
RATE, STEPS, BATCH, LENGTH, BETA, SEED = 1e-2, 4, 8, 192, 0.2, 7
EPS = 1e-5
"""Of AdamW: large enough that an element whose gradient is nearly 0 hardly moves."""

SAID = {
    "max_steps": STEPS,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


@dataclass
class Watch(TrainerCallback):
    """Keeps the losses, and this rank's share of what is trained."""

    losses: list[float]
    share: float = 1.0
    kind: str = ""

    def on_step_begin(self, _arguments: Any, _state: Any, _control: Any, **more: Any) -> None:
        self.kind, self.share = sharding(more["model"], more["optimizer"])

    def on_log(self, *_: Any, logs: dict[str, float], **_more: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def sharding(model: Module, optimizer: Any) -> tuple[str, float]:
    """What shards a model, and the share of its trained numbers that this rank holds."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    inner = getattr(optimizer, "optimizer", optimizer)
    if hasattr(trained[0], "ds_tensor"):
        held = [parameter.ds_tensor.numel() for parameter in model.parameters()]
        return "zero3", sum(held) / sum(parameter.ds_numel for parameter in model.parameters())
    if hasattr(inner, "single_partition_of_fp32_groups"):
        held = [part.numel() for part in inner.single_partition_of_fp32_groups]
        return "zero2", sum(held) / sum(parameter.numel() for parameter in trained)
    return type(inner).__name__, 1.0


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
    # The functions' own names: run_path returns a copy of them.
    example["make_trainer"].__globals__["training_arguments"] = recreated
    seen = {}
    for engine in SHARDED:
        for objective in OBJECTIVES:
            recipe = load_recipe(folder / f"{objective}.yaml", ENGINES[engine])
            example["check"](recipe)
            output = str(folder / f"{objective}-{engine}")
            trainer = example["make_trainer"](recipe, output_dir=output, **SAID)
            seen[f"{objective}-{engine}"] = train(trainer)
            forget()
    return seen


def recreated(recipe: Any, *, config_class: Any, **more: Any) -> Any:
    """A recipe's arguments, created from their fields, as TRL and other scripts do."""
    first = training_arguments(recipe, config_class=config_class, **more)
    stated = {key: value for key, value in first.to_dict().items() if "token" not in key}
    del first
    return config_class(**stated)


def train(trainer: Any) -> Seen:
    """Train and save."""
    watch = Watch([])
    trainer.add_callback(watch)
    trainer.train()
    trainer.save_model()
    seen = {"losses": watch.losses, "kind": watch.kind, "share": watch.share}
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    margins = [entry["rewards/margins"] for entry in logged if "rewards/margins" in entry]
    return {**seen, "margins": margins}
