"""Settings of other tools, by the name a user knows: what they are called here.

Only error texts use these names. A foreign name is never accepted. Names in the files of other
tools have rows in the tables of `toolkit/foreign`. Here are names without a row, and notes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ruamel.yaml import YAML

from toolkit.optimizers.base import OPTIMIZERS
from toolkit.removed import removed


@dataclass(frozen=True)
class Foreign:
    """Which setting of ours stands for a setting of another tool."""

    target: str | None
    """Dotted path of our setting. None when there is none, because it is derived."""
    note: str = ""
    """How to translate the value, or why there is no such setting."""

    @property
    def advice(self) -> str:
        """One line for the `fix` of an error."""
        if self.target is None:
            return self.note
        return f"write `{self.target}`" + (f" ({self.note})" if self.note else "")


_NAMES = {
    # batch
    Foreign(None, "derived: global_batch_size / (micro_batch_size · dp); remove it and "
            "set `training.global_batch_size`"):
        "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches",
    Foreign("training.micro_batch_size"):
        "per_device_eval_batch_size local_batch_size micro_batch",
    Foreign("training.global_batch_size", "sequences per optimizer step over all ranks"):
        "train_batch_size batch_size global_batch",
    Foreign("training.batch_ramp", "`{start: N, increment: N, steps: N}`"):
        "rampup_batch_size batch_size_rampup",
    Foreign("training.sequence_length"): "seq_len",
    # length of the run
    Foreign("training.steps", "samples / global_batch_size"): "train_samples",
    # optimizer and schedule
    Foreign("optimizer.weight_decay"): "weight_decay_rate",
    Foreign("optimizer.betas", "both in one list: [beta1, beta2]"): "adam_beta1 adam_beta2",
    Foreign("optimizer.groups", "a list of `{parameters: […], lr_mult: …, wd_mult: …}`"):
        "decoupled_lr lr_groups embedding_lr embedding_lr_scale embedding_learning_rate "
        "loraplus_lr_ratio no_decay_params layerwise_lr_decay layer_lr_decay llrd",
    Foreign("schedule.name"): "scheduler",
    Foreign("schedule.warmup_steps"): "lr_warmup_iters warmup_num_steps",
    # precision and seed
    Foreign("training.precision", "one of fp32, bf16, fp16"):
        "bf16 fp16 tf32 mixed_precision torch_dtype dtype",
    Foreign("training.seed"): "random_seed",
    # parallelism
    Foreign("parallel.tensor"): "tensor_parallel tensor_parallel_degree tp tp_size",
    Foreign("parallel.pipeline"):
        "pipeline_parallel pipeline_parallel_size pipeline_parallel_degree pp",
    Foreign("parallel.virtual_pipeline", "chunks per pipeline stage, not layers"):
        "num_layers_per_virtual_pipeline_stage virtual_pipeline_model_parallel_size",
    Foreign("parallel.context"):
        "context_parallel_degree context_parallel cp cp_size sequence_parallel_degree sp_size "
        "ring_degree ulysses_sequence_parallel_size ulysses_parallel_size",
    Foreign("kernels.context", "all_gather or ulysses"):
        "cp_comm_type cp_comm_strategy cp_mode ring_attn_func",
    Foreign("parallel.expert"): "expert_parallel expert_parallel_degree ep",
    Foreign(None, "derived: world / (tensor · pipeline · context); remove it"):
        "data_parallel_size data_parallel_shard_degree dp",
    Foreign(None, "derived: nodes · gpus_per_node of `cluster`; remove it"): "world_size",
    Foreign(None, "the megatron engine always does; remove it"): "use_distributed_optimizer",
    Foreign("parallel.zero", "stage, offload_optimizer, …"): "zero_optimization",
    Foreign(None, "write it into a DeepSpeed JSON file, and name that in parallel.zero.config"):
        "allgather_bucket_size overlap_comm reduce_bucket_size "
        "stage3_param_persistence_threshold stage3_prefetch_bucket_size",
    Foreign("parallel.zero.config", "name the JSON file there"): "deepspeed deepspeed_config",
    Foreign("parallel.engine", "`engine: fsdp`"): "fsdp",
    Foreign("parallel.zero.offload_parameters"): "offload_param",
    Foreign("parallel.zero.offload_optimizer", "`cpu`"): "cpu_offload",
    Foreign("parallel.recompute", "one of none, selective, full, auto, or a number of layers"):
        "gradient_checkpointing activation_checkpoint recompute_granularity "
        "recompute_num_layers",
    Foreign("cluster.nodes"): "num_nodes",
    Foreign("cluster.gpus_per_node"): "num_gpus",
    # adapters
    Foreign("adapter", "a map with rank and alpha"): "peft use_peft lora peft_config",
    Foreign("adapter.rank"): "adapter.r",
    Foreign("adapter.alpha", "divided by the rank: multiply it by √rank"):
        "use_rslora peft_use_rslora",
    Foreign("adapter.targets", "all-linear, attention, mlp or a list"):
        "target_modules lora_target lora_target_modules lora_target_linear",
    # model and data
    Foreign("model.hub"): "model_name",
    Foreign("data.tokenizer", "a hub id, a local folder or `bytes`"):
        "tokenizer_name tokenizer_name_or_path tokenizer_type tokenizer_model",
    Foreign("data.train", "a map with a `kind`, e.g. `text`, `hf` or `chat`"):
        "dataset datasets dataset_name train_file data_path",
    Foreign("data.validation", "a map with a `kind`, e.g. `text`, `hf` or `chat`"):
        "validation_file",
    # what this release does not do
    Foreign(None, "this release keeps frozen weights in the training precision; remove it"):
        "load_in_4bit load_in_8bit quantization",
    # TRL, LLaMA-Factory
    Foreign(None, "no noise is added to embeddings; remove it"): "neftune_noise_alpha neftune",
    Foreign("checkpoint.keep_best", "a number; `export/` is then of the best checkpoint"):
        "load_best_model_at_end",
    Foreign(None, "the best checkpoint has the lowest validation loss; remove it"):
        "metric_for_best_model greater_is_better",
    Foreign("kernels.fp8"): "float8 fp8_recipe float8_recipe_name enable_fp8",
    Foreign("evaluation.patience", "in validations"):
        "early_stopping early_stopping_patience early_stopping_steps",
    Foreign(None, "a lower loss counts, however little; remove it"): "early_stopping_threshold",
    Foreign(None, "nothing is generated in training; remove it, docs/checkpoints.md has how"):
        "generate predict_with_generate do_sample generation_config generation_max_length",
    Foreign("dpo.loss", "`sigmoid`, `ipo` or `hinge`"): "loss_type pref_loss",
    Foreign("dpo.beta"): "pref_beta dpo_beta",
    Foreign("dpo.sft_weight"): "rpo_alpha",
    Foreign("data.train", "`{kind: chat, path: …}`"): "messages conversations sft",
    Foreign("data.train.loss_on"):
        "train_on_inputs assistant_only_loss completion_only_loss "
        "completion_only completion_only_collator",
    # what is written
    Foreign("evaluation.every_steps"): "eval_interval",
    Foreign("evaluation.batches"): "eval_iters",
    Foreign("checkpoint.every_steps"): "save_interval",
    Foreign(None, "the run of a directory continues by itself; remove it"):
        "resume resume_from_checkpoint",
    Foreign("name", "it names the run directory, `runs/<name>`"): "output_dir run_name",
    Foreign("logging.trackers", "e.g. `[wandb, tensorboard]`"):
        "report_to wandb use_wandb tensorboard use_tensorboard mlflow trackio",
    Foreign(None, "set WANDB_MODE in the environment"): "wandb_mode",
}  # fmt: skip
"""Their names by what they are here."""

FOREIGN = {name: one for one, names in _NAMES.items() for name in names.split()}

FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "training.precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float32": "fp32",
        "float": "fp32",
        "no": "fp32",
    },
    "optimizer.name": {
        alias: name for name, kind in OPTIMIZERS.items() for alias in kind.aliases
    },
    "schedule.name": {
        "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine",
        "warmup_stable_decay": "wsd",
        "reduce_lr_on_plateau": "plateau",
        "reducelronplateau": "plateau",
        "warmupdecaylr": "linear",
    },
    "parallel.engine": {
        "fsdp2": "fsdp",
        "zero": "deepspeed",
        "megatron-lm": "megatron",
    },
    "kernels.context": {
        "allgather": "all_gather",
        "a2a": "ulysses",
    },
    "parallel.zero.offload_optimizer": {"true": "cpu", "false": "none"},
    "parallel.zero.offload_parameters": {"true": "cpu", "false": "none"},
    "data.packing": {"false": "none"},
    "parallel.model": {"transformers": "hf", "huggingface": "hf", "mcore": "megatron"},
    "model.init": {"scratch": "random", "from_pretrained": "pretrained"},
}
"""Values of other tools, lower-case, by our setting: what they are called here."""


_NO_RL = "this release trains on given answers only: write dpo or orpo, with preferences"
_NO_RING = "write all_gather, which has the same losses: rings were removed"
_PACKS = "write greedy for chats, best_fit for documents"
_NO_ONE_BIT = (
    "DeepSpeed 0.19 has no 1-bit optimizers: write adamw; parallel.outer sends fewer bytes"
)
_ONE_BIT = "onebitadam onebit_adam zerooneadam zero_one_adam onebitlamb onebit_lamb"

_FP8 = "write bf16, and `kernels: {fp8: rowwise}`"

LATER_VALUES: dict[str, dict[str, str]] = {
    "cluster.gpu": {
        "a map": "describe it in a cluster file, and name that with --cluster (docs/cluster.md)"
    },
    "training.precision": dict.fromkeys(("fp8", "float8"), _FP8),
    "kernels.fp8": {"rowwise_with_gw_hp": "write rowwise, or null for products in 16 bits"},
    "parallel.engine": {
        f"zero{n}": f"write deepspeed, and `zero: {{stage: {n}}}` next to it" for n in (1, 2, 3)
    },
    "optimizer.name": {
        **dict.fromkeys(_ONE_BIT.split(), _NO_ONE_BIT),
        "adafactor": "write adamw_8bit: moments of 8 bits",
    },
    "training.objective": dict.fromkeys(("grpo", "ppo", "rloo", "gspo", "kto"), _NO_RL),
    "data.packing": {"true": _PACKS},
    "parallel.zero": {str(stage): f"write {{stage: {stage}}}" for stage in range(4)},
    "kernels.context": {
        **dict.fromkeys(("ring", "p2p", "alltoall", "batch_ring"), _NO_RING),
        **dict.fromkeys(("ulysses_ring", "a2a+p2p"), "write ulysses: rings were removed"),
    },
}
"""Values, lowercase, by our setting, that this release lacks or splits: what to write."""


def value_fix(key: str, value: object) -> str:
    """The fix of a value that another tool has, or that this release lacks. Empty otherwise."""
    text = str(value).lower()
    if ours := FOREIGN_VALUES.get(key, {}).get(text):
        return f"write {ours}"
    return removed().values.get(key, {}).get(text) or LATER_VALUES.get(key, {}).get(text, "")


@cache
def carried() -> Mapping[str, str]:
    """Our settings by the names that have a row in a table of `toolkit/foreign`."""
    found: dict[str, str] = {}
    for file in sorted((Path(__file__).parents[1] / "foreign").glob("*.yaml")):
        for name, row in YAML(typ="safe").load(file)["carry"].items():
            to = row.get("to", "") if isinstance(row, dict) else row
            ours = (to[0] if isinstance(to, list) else to).partition("[")[0]
            if "." in ours and "." not in name:
                found.setdefault(name.lstrip("-").replace("-", "_"), ours)
    return found


def foreign(name: str) -> Foreign | None:
    """Find our name of a foreign setting by its name or, where that is short, with its
    section. Dashes, case and leading `--` do not matter."""
    name = name.lstrip("-").replace("-", "_").lower()
    ours = carried().get(name)
    return FOREIGN.get(name) or (Foreign(ours) if ours else None)
