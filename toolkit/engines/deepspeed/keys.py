"""What a DeepSpeed file may say: its known keys, and what a recipe decides of them.

DeepSpeed drops unknown keys silently at the top level and in some blocks. `known_keys.json` has
those that it knows, so that `check` needs no DeepSpeed. A test compares the file with the
installed DeepSpeed's own classes, and rewrites it if DMT_UPDATE_GOLDEN is set.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("known_keys.json")
_TABLES = {
    name: frozenset(keys) for name, keys in json.loads(FILE.read_text(encoding="utf-8")).items()
}

GONE = _TABLES.pop("removed")
"""Keys of its top level and of `zero_optimization` that it refuses by name."""
KNOWN_KEYS: Mapping[str, frozenset[str]] = _TABLES
"""Keys of each checked block, where "" is the top level. `optimizer.params` holds those of
AdamW. Old spellings that DeepSpeed still translates (`cpu_offload`, …) are left out on
purpose."""

ZERO = "zero_optimization"
OFFLOAD_OPTIMIZER = f"{ZERO}.offload_optimizer"
OFFLOAD_PARAMETERS = f"{ZERO}.offload_param"
HPZ = f"{ZERO}.zero_hpz_partition_size"
QUANTIZED_GRADIENTS = f"{ZERO}.zero_quantized_gradients"


class KeyRule(NamedTuple):
    """What a file may say at a key. Exactly one of the first four is set."""

    recipe: str = ""
    """The recipe's key that decides the value. The file may say the same, or "auto"."""
    required: object = None
    """The only value that keeps the loss equal under every layout (AdamW with fp32 master
    weights and moments, mean gradients, the recipe's precision and data order) and keeps NaN
    out of the weights."""
    absent: str = ""
    """Why no run can use it."""
    rounds: tuple[str, str] | None = None
    """A switch that may round more than the recipe's precision: what it rounds, and how."""
    fix: str = "delete it"


RULES: Mapping[str, KeyRule] = {
    "train_batch_size": KeyRule("training.global_batch_size"),
    "train_micro_batch_size_per_gpu": KeyRule("training.micro_batch_size"),
    "gradient_accumulation_steps": KeyRule(
        "training.global_batch_size / (training.micro_batch_size · dp)"
    ),
    "gradient_clipping": KeyRule("optimizer.clip_grad_norm"),
    "bf16.enabled": KeyRule("training.precision"),
    "fp16.enabled": KeyRule("training.precision"),
    "optimizer.type": KeyRule("optimizer.name"),
    "optimizer.params.lr": KeyRule("optimizer.learning_rate"),
    "optimizer.params.betas": KeyRule("optimizer.betas"),
    "optimizer.params.eps": KeyRule("optimizer.eps"),
    "optimizer.params.weight_decay": KeyRule("optimizer.weight_decay"),
    f"{ZERO}.stage": KeyRule("parallel.zero.stage"),
    f"{OFFLOAD_OPTIMIZER}.device": KeyRule("parallel.zero.offload_optimizer"),
    f"{OFFLOAD_OPTIMIZER}.nvme_path": KeyRule("parallel.zero.nvme_path"),
    f"{OFFLOAD_PARAMETERS}.device": KeyRule("parallel.zero.offload_parameters"),
    f"{OFFLOAD_PARAMETERS}.nvme_path": KeyRule("parallel.zero.nvme_path"),
    "optimizer.params.adam_w_mode": KeyRule(required=True),
    "gradient_allreduce_op": KeyRule(required="mean"),
    "bf16.check_grad_overflow": KeyRule(required=True),
    f"{ZERO}.compute_grad_norm": KeyRule(required=True),
    "fp16.fp16_master_weights_and_grads": KeyRule(required=False),
    "torch_autocast.enabled": KeyRule(required=False),
    "data_efficiency.enabled": KeyRule(required=False),
    "use_data_before_expert_parallelism": KeyRule(required=False),
    "scheduler": KeyRule(
        absent="the recipe's `schedule` sets the learning rate of every step",
        fix="delete the block and set `schedule` in the recipe",
    ),
    "bfloat16": KeyRule(absent="the block is `bf16`", fix="rename the block to `bf16`"),
    f"{ZERO}.zenflow": KeyRule(
        absent="ZenFlow changes the initial weights, and keeps states that no checkpoint has"
    ),
    f"{OFFLOAD_OPTIMIZER}.super_offload": KeyRule(
        absent="no checkpoint has its moments, and a NaN in a gradient sets weights to 0"
    ),
    "tensor_parallel": KeyRule(
        absent="tensor parallel is megatron-core's (parallel.tensor in the recipe)"
    ),
    "expert_parallel": KeyRule(
        absent="expert parallel is megatron-core's (parallel.expert in the recipe)"
    ),
    "compile.deepcompile": KeyRule(
        absent="a step could not be skipped; kernels.compile compiles layers"
    ),
    f"{ZERO}.zero_quantized_nontrainable_weights": KeyRule(
        absent="frozen weights keep their values, and DeepSpeed would round them"
    ),
    f"{ZERO}.zero_quantized_weights": KeyRule(
        rounds=("gathered weights", "sent in blocks of 8 bits")
    ),
    QUANTIZED_GRADIENTS: KeyRule(
        rounds=("gradient reduction", "in blocks of 4 bits between nodes")
    ),
    "bf16.bf16_master_weights_and_grads": KeyRule(
        rounds=("AdamW", "in bf16: a change of a weight by less than 1/512 may be lost")
    ),
    "bf16.bf16_optimizer_states": KeyRule(rounds=("moments", "kept in bf16")),
}
"""Every key of a DeepSpeed file about which DMT says more than DeepSpeed (docs/limitations.md).
All others are the file's own matter."""

OWNED = {key: rule.recipe for key, rule in RULES.items() if rule.recipe}
REQUIRED = {key: rule.required for key, rule in RULES.items() if rule.required is not None}
ABSENT = {key: rule for key, rule in RULES.items() if rule.absent}
LESS_EXACT = {key: rule.rounds for key, rule in RULES.items() if rule.rounds is not None}
