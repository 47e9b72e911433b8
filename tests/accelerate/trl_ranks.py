"""What each rank of tests/accelerate/test_trl.py does, with SFTTrainer and a plain Trainer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from torch.nn import Module
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)

from tests.accelerate.examples_worker import ENGINES, forget
from tests.e2e.conftest import WORDS
from toolkit.accelerate import training_arguments

Seen = dict[str, Any]
CLIENTS = ("full", "lora")
STEPS = 4
RATE, WARMUP = 1e-2, 2
SCHEDULES: dict[str, list[str]] = {
    "constant": ["schedule.name=constant"],
    "linear": ["schedule.name=linear"],
    "cosine": [],
    "wsd": ["schedule.name=wsd", "schedule.decay_steps=2"],
}
OVERRULED = {
    "learning_rate": 2 * RATE,
    "lr_scheduler_type": "polynomial",
    "lr_scheduler_kwargs": {"lr_end": RATE},
    "warmup_steps": 1,
    "max_grad_norm": 0.5,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 3,
}
"""What a user says differently from the recipe."""
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
    if hasattr(trained[0], "to_local"):
        held = [parameter.to_local().numel() for parameter in model.parameters()]
        return "fsdp2", sum(held) / sum(parameter.numel() for parameter in model.parameters())
    if hasattr(inner, "single_partition_of_fp32_groups"):
        held = [part.numel() for part in inner.single_partition_of_fp32_groups]
        return "zero2", sum(held) / sum(parameter.numel() for parameter in trained)
    return type(inner).__name__, 1.0


def texts() -> Dataset:
    """Samples of unequal lengths, so that micro batches have unequal numbers of tokens."""
    lines = [" ".join(WORDS[: 3 + (7 * n) % 8] * (1 + n % 3)) for n in range(64)]
    return Dataset.from_dict({"text": lines})


def plain(folder: Path) -> dict[str, Seen]:
    """The reference: one process, none of our arguments."""
    seen = {}
    for client in CLIENTS:
        arguments = trl.SFTConfig(
            output_dir=str(folder / f"{client}-plain"),
            per_device_train_batch_size=8,
            learning_rate=RATE,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=WARMUP,
            max_grad_norm=1.8,
            weight_decay=0.1,
            adam_epsilon=1e-3,
            adam_beta2=0.95,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            seed=7,
            **SAID,
        )
        seen[client] = train(folder, client, arguments)
    return seen


def sharded(folder: Path) -> dict[str, Seen]:
    """Every client under every engine, by the arguments of a recipe."""
    seen = {}
    for engine, overrides in ENGINES.items():
        for client in CLIENTS:
            more = {**SAID, "output_dir": str(folder / f"{client}-{engine}")}
            if client == "full":
                arguments = made(folder, overrides, **more)
            else:  # as a script does that changes them by itself
                first = made(folder, overrides, config_class=trl.SFTConfig, **more)
                said = {k: v for k, v in first.to_dict().items() if "token" not in k}
                del first
                arguments = trl.SFTConfig(**said)
                assert arguments.max_length == 32, "the recipe's sequence length"
            seen[f"{client}-{engine}"] = train(folder, client, arguments)
        if engine == "zero2":
            for name, changes in SCHEDULES.items():
                seen[name] = by_trainer(folder, [*overrides, *changes])
            seen["overruled"] = by_trainer(folder, overrides, **OVERRULED)
        forget()
    return seen


def made(folder: Path, overrides: list[str], **more: Any) -> Any:
    return training_arguments(folder / "sft.yaml", overrides, **more)


def by_trainer(folder: Path, overrides: list[str], **more: Any) -> Seen:
    """The learning rates of a plain Trainer, and what DeepSpeed made of its arguments."""
    said = {**SAID, "output_dir": str(folder / "trainer"), **more}
    arguments = made(folder, overrides, **said)
    model = AutoModelForCausalLM.from_pretrained(folder / "start")
    tokens = torch.arange(32) % 300
    samples = [{"input_ids": tokens, "labels": tokens}] * 256
    watch = Watch([])
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[watch])
    trainer.train()
    engine = trainer.model_wrapped
    return {
        "kind": watch.kind,
        "rates": [entry["learning_rate"] for entry in trainer.state.log_history[:-1]],
        "clipping": engine.gradient_clipping(),
        "micro batch": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
    }


def train(folder: Path, client: str, arguments: Any) -> Seen:
    """Train and save by SFTTrainer."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    trainer = trl.SFTTrainer(
        model=str(folder / "start"),
        args=arguments,
        train_dataset=texts(),
        processing_class=PreTrainedTokenizerFast.from_pretrained(folder / "start"),
        peft_config=lora if client == "lora" else None,
    )
    return train_watched(trainer)


def train_watched(trainer: Trainer) -> Seen:
    """Train and save."""
    watch = Watch([])
    trainer.add_callback(watch)
    trainer.train()
    trainer.save_model()
    return {"losses": watch.losses, "kind": watch.kind, "share": watch.share}
