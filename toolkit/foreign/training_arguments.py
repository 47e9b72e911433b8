"""The table of Hugging Face's `TrainingArguments`: what `toolkit.accelerate.training_arguments`
writes, and `toolkit/foreign/trainer.py` reads."""

from collections.abc import Mapping

from toolkit.foreign.base import ACCUMULATION, CLIPPING, Row, TargetKey, translated
from toolkit.optimizers.base import OPTIMIZERS


def _optimizer(name: str) -> str:
    return OPTIMIZERS[name].elsewhere["TrainingArguments"]


KEYS: Mapping[str, Row] = {
    "per_device_train_batch_size": "training.micro_batch_size",
    "gradient_accumulation_steps": ACCUMULATION,
    "learning_rate": "optimizer.learning_rate",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.betas[0]",
    "adam_beta2": "optimizer.betas[1]",
    "adam_epsilon": "optimizer.eps",
    "optim": TargetKey("optimizer.name", translated("optimizer.name"), _optimizer),
    "lr_scheduler_type": TargetKey("schedule.name", translated("schedule.name"), None),
    "seed": "training.seed",
    "data_seed": TargetKey("training.seed", write=None),
    "save_total_limit": TargetKey("checkpoint.keep", write=None),
    "run_name": TargetKey("name", write=None),
    "model_name_or_path": TargetKey("model.hub", write=None),
    "max_seq_length": TargetKey("training.sequence_length", write=None),
    "max_length": TargetKey("training.sequence_length", write=None),
    "max_grad_norm": CLIPPING,
}
"""Settings that do not depend on others; a script adds its own: its schedule, intervals and
what it saves."""
