"""Settings of other tools, by the name a user knows: what they are called here.

Only error texts use this table; a foreign name is never accepted. Sources: the
argument references of Megatron-LM, DeepSpeed's JSON, Hugging Face `TrainingArguments`,
Axolotl, LLaMA-Factory and torchtitan.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Foreign:
    """Where a foreign setting went."""

    target: str | None
    """Dotted path of our setting; None when there is none, because it is derived."""
    note: str = ""
    """How to translate the value, or why there is no such setting."""

    @property
    def advice(self) -> str:
        """One line for the `fix` of an error."""
        if self.target is None:
            return self.note
        return f"write `{self.target}`" + (f" ({self.note})" if self.note else "")


_ACCUMULATION = Foreign(
    None,
    "derived: global_batch_size / (micro_batch_size · dp); remove it and set "
    "`training.global_batch_size`",
)
_MICRO = Foreign("training.micro_batch_size")
_GLOBAL = Foreign("training.global_batch_size", "sequences per optimizer step over all ranks")
_LENGTH = Foreign("training.sequence_length")
_RATE = Foreign("optimizer.learning_rate")
_MIN_RATE = Foreign("schedule.min_learning_rate")
_WARMUP_SHARE = Foreign("schedule.warmup_steps", "in steps: the ratio times `training.steps`")
_PRECISION = Foreign("training.precision", "one of fp32, bf16, fp16, fp8")
_BETAS = Foreign("optimizer.betas", "both in one list: [beta1, beta2]")
_TENSOR = Foreign("parallel.tensor")
_PIPELINE = Foreign("parallel.pipeline")
_CONTEXT = Foreign("parallel.context")
_EXPERT = Foreign("parallel.expert")
_VIRTUAL = Foreign("parallel.virtual_pipeline", "chunks per pipeline stage, not layers")
_ZERO_CONFIG = Foreign("parallel.zero.config", "name the JSON file there")
_ZERO_STAGE = Foreign("parallel.zero.stage")
_RECOMPUTE = Foreign("parallel.recompute", "one of none, selective, full, auto")
_TOKENIZER = Foreign("data.tokenizer", "a hub id, a local folder or `bytes`")
_TRAIN_DATA = Foreign("data.train", "a map with `kind: text`, `hf` or `megatron`")
_VALIDATION_DATA = Foreign("data.validation", "a map with `kind: text`, `hf` or `megatron`")
_EVERY_EVAL = Foreign("evaluation.every_steps")
_EVERY_SAVE = Foreign("checkpoint.every_steps")
_WANDB = Foreign("logging.wandb.project")
_RUN_DIRECTORY = Foreign("name", "it names the run directory, `runs/<name>`")
_ALL_WEIGHTS = Foreign(None, "this release trains all weights, without adapters; remove it")
_TEXT_ONLY = Foreign(None, "this release trains on text, not on chats; remove it")
_DERIVED_RANKS = Foreign(None, "derived: world / (tensor · pipeline · context); remove it")

FOREIGN: dict[str, Foreign] = {
    # batch
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_accumulation": _ACCUMULATION,
    "accumulate_grad_batches": _ACCUMULATION,
    "per_device_train_batch_size": _MICRO,
    "per_device_eval_batch_size": _MICRO,
    "train_micro_batch_size_per_gpu": _MICRO,
    "local_batch_size": _MICRO,
    "micro_batch": _MICRO,
    "train_batch_size": _GLOBAL,
    "batch_size": _GLOBAL,
    "global_batch": _GLOBAL,
    "seq_length": _LENGTH,
    "seq_len": _LENGTH,
    "sequence_len": _LENGTH,
    "cutoff_len": _LENGTH,
    "max_seq_length": _LENGTH,
    "block_size": _LENGTH,
    # length of the run
    "max_steps": Foreign("training.steps"),
    "train_iters": Foreign("training.steps"),
    "train_samples": Foreign("training.steps", "samples / global_batch_size"),
    "num_train_epochs": Foreign("training.epochs"),
    "num_epochs": Foreign("training.epochs"),
    # optimizer and schedule
    "lr": _RATE,
    "weight_decay_rate": Foreign("optimizer.weight_decay"),
    "optim": Foreign("optimizer.name"),
    "adam_beta1": _BETAS,
    "adam_beta2": _BETAS,
    "adam_epsilon": Foreign("optimizer.eps"),
    "adam_eps": Foreign("optimizer.eps"),
    "max_grad_norm": Foreign("optimizer.clip_grad_norm"),
    "clip_grad": Foreign("optimizer.clip_grad_norm"),
    "gradient_clipping": Foreign("optimizer.clip_grad_norm"),
    "lr_scheduler_type": Foreign("schedule.name"),
    "lr_scheduler": Foreign("schedule.name"),
    "lr_decay_style": Foreign("schedule.name"),
    "scheduler": Foreign("schedule.name"),
    "min_lr": _MIN_RATE,
    "warmup_ratio": _WARMUP_SHARE,
    "lr_warmup_fraction": _WARMUP_SHARE,
    "lr_warmup_iters": Foreign("schedule.warmup_steps"),
    "warmup_num_steps": Foreign("schedule.warmup_steps"),
    "lr_wsd_decay_iters": Foreign("schedule.decay_steps"),
    # precision and seed
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "fp8": _PRECISION,
    "tf32": _PRECISION,
    "mixed_precision": _PRECISION,
    "torch_dtype": _PRECISION,
    "dtype": _PRECISION,
    "random_seed": Foreign("training.seed"),
    # parallelism
    "tensor_model_parallel_size": _TENSOR,
    "tensor_parallel_size": _TENSOR,
    "tensor_parallel_degree": _TENSOR,
    "tp": _TENSOR,
    "tp_size": _TENSOR,
    "pipeline_model_parallel_size": _PIPELINE,
    "pipeline_parallel_size": _PIPELINE,
    "pipeline_parallel_degree": _PIPELINE,
    "pp": _PIPELINE,
    "num_layers_per_virtual_pipeline_stage": _VIRTUAL,
    "virtual_pipeline_model_parallel_size": _VIRTUAL,
    "context_parallel_size": _CONTEXT,
    "context_parallel_degree": _CONTEXT,
    "cp": _CONTEXT,
    "expert_model_parallel_size": _EXPERT,
    "expert_parallel_degree": _EXPERT,
    "ep": _EXPERT,
    "data_parallel_size": _DERIVED_RANKS,
    "data_parallel_shard_degree": _DERIVED_RANKS,
    "dp": _DERIVED_RANKS,
    "world_size": Foreign(None, "derived: nodes · gpus_per_node of `cluster`; remove it"),
    "sequence_parallel": Foreign("parallel.sequence"),
    "use_distributed_optimizer": Foreign(None, "the megatron engine always does; remove it"),
    "zero_optimization": Foreign("parallel.zero", "stage, offload_optimizer, …"),
    "zero_stage": _ZERO_STAGE,
    "deepspeed": _ZERO_CONFIG,
    "deepspeed_config": _ZERO_CONFIG,
    "fsdp": Foreign("parallel.engine", "`engine: fsdp`"),
    "offload_optimizer_device": Foreign("parallel.zero.offload_optimizer"),
    "offload_param": Foreign("parallel.zero.offload_parameters"),
    "offload_param_device": Foreign("parallel.zero.offload_parameters"),
    "cpu_offload": Foreign("parallel.zero.offload_optimizer", "`cpu`"),
    "gradient_checkpointing": _RECOMPUTE,
    "activation_checkpoint": _RECOMPUTE,
    "recompute_granularity": _RECOMPUTE,
    "num_nodes": Foreign("cluster.nodes"),
    "nnodes": Foreign("cluster.nodes"),
    "nproc_per_node": Foreign("cluster.gpus_per_node"),
    "num_gpus": Foreign("cluster.gpus_per_node"),
    # model and data
    "model_name_or_path": Foreign("model.hub"),
    "base_model": Foreign("model.hub"),
    "model_name": Foreign("model.hub"),
    "tokenizer_name": _TOKENIZER,
    "tokenizer_name_or_path": _TOKENIZER,
    "tokenizer_type": _TOKENIZER,
    "tokenizer_model": _TOKENIZER,
    "dataset": _TRAIN_DATA,
    "datasets": _TRAIN_DATA,
    "dataset_name": _TRAIN_DATA,
    "train_file": _TRAIN_DATA,
    "data_path": _TRAIN_DATA,
    "validation_file": _VALIDATION_DATA,
    "val_set_size": Foreign("data.validation_fraction"),
    "val_size": Foreign("data.validation_fraction"),
    # what this release does not do
    "adapter": _ALL_WEIGHTS,
    "peft": _ALL_WEIGHTS,
    "use_peft": _ALL_WEIGHTS,
    "lora": _ALL_WEIGHTS,
    "lora_r": _ALL_WEIGHTS,
    "lora_rank": _ALL_WEIGHTS,
    "lora_alpha": _ALL_WEIGHTS,
    "lora_dropout": _ALL_WEIGHTS,
    "target_modules": _ALL_WEIGHTS,
    "load_in_4bit": _ALL_WEIGHTS,
    "load_in_8bit": _ALL_WEIGHTS,
    "quantization": _ALL_WEIGHTS,
    "chat_template": _TEXT_ONLY,
    "messages": _TEXT_ONLY,
    "conversations": _TEXT_ONLY,
    "sft": _TEXT_ONLY,
    "dpo": _TEXT_ONLY,
    "rl": _TEXT_ONLY,
    # what is written
    "eval_steps": _EVERY_EVAL,
    "eval_interval": _EVERY_EVAL,
    "eval_iters": Foreign("evaluation.batches"),
    "save_steps": _EVERY_SAVE,
    "save_interval": _EVERY_SAVE,
    "save_total_limit": Foreign("checkpoint.keep"),
    "resume_from_checkpoint": Foreign("checkpoint.resume", "`auto` or `never`"),
    "output_dir": _RUN_DIRECTORY,
    "run_name": _RUN_DIRECTORY,
    "logging_steps": Foreign("logging.every_steps"),
    "log_interval": Foreign("logging.every_steps"),
    "wandb_project": _WANDB,
    "wandb_entity": Foreign("logging.wandb.entity"),
    "report_to": Foreign("logging.wandb", "`{project: …}`, or `logging.tensorboard: true`"),
}

FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "training.precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float": "fp32",
        "no": "fp32",
        "float8": "fp8",
    },
    "optimizer.name": {
        "adam": "adamw",
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_hf": "adamw",
        "fusedadam": "adamw",
    },
    "schedule.name": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "warmup_stable_decay": "wsd",
        "warmupdecaylr": "linear",
    },
    "parallel.engine": {"fsdp2": "fsdp", "zero": "deepspeed", "megatron-lm": "megatron"},
    "parallel.model": {"transformers": "hf", "huggingface": "hf", "mcore": "megatron"},
    "model.init": {"scratch": "random", "from_pretrained": "pretrained"},
}
"""Values of other tools, lower-case, by our setting: what they are called here."""


def foreign(name: str) -> Foreign | None:
    """What a foreign setting is called here; dashes, case and leading `--` do not matter."""
    return FOREIGN.get(name.lstrip("-").replace("-", "_").lower())
