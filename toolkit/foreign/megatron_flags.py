"""Megatron-LM's flags: those of a model by their fields in megatron-core, and the layout of a
plan as `dmt plan --flags megatron-lm` prints it.

Flags and their meaning are those of `megatron/training/arguments.py` in Megatron-LM
core_v0.16.1.
"""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.errors import PlanError
from toolkit.layout import Layout, stage_layers
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe

Arguments = Iterator[tuple[str, ...]]
"""Flags, each with its values."""

OPTIMIZER_KEYS: Mapping[str, str] = {
    "--lr": "optimizer.learning_rate",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta1": "optimizer.betas[0]",
    "--adam-beta2": "optimizer.betas[1]",
    "--adam-eps": "optimizer.eps",
}
RUN_KEYS: Mapping[str, str] = {
    "--micro-batch-size": "training.micro_batch_size",
    "--global-batch-size": "training.global_batch_size",
    "--seq-length": "training.sequence_length",
    "--train-iters": "training.steps",
    "--seed": "training.seed",
}
"""Flags with the value of the recipe."""

WSD_DECAYS = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
"""`schedule.decay` → the value of `--lr-wsd-decay-style`."""


def _flags(names: str) -> dict[str, str]:
    """Fields whose flags have their names, as most have."""
    return {name: f"--{name.replace('_', '-')}" for name in names.split()}


def _switches_on(names: str) -> dict[str, tuple[bool, str]]:
    """Fields that their flags turn on."""
    return {name: (True, flag) for name, flag in _flags(names).items()}


TRANSFORMER_VALUES = {
    **_flags(
        "num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size normalization"
    ),
    "layernorm_epsilon": "--norm-epsilon",
    **_flags(
        "attention_dropout hidden_dropout q_lora_rank kv_lora_rank qk_head_dim "
        "qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor mscale mscale_all_dim"
    ),
    "num_moe_experts": "--num-experts",
    **_flags(
        "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
        "moe_router_score_function moe_router_dtype moe_router_num_groups "
        "moe_router_group_topk moe_router_topk_scaling_factor moe_router_bias_update_rate "
        "moe_router_load_balancing_type moe_aux_loss_coeff moe_token_dispatcher_type "
        "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
        "expert_model_parallel_size expert_tensor_parallel_size recompute_granularity "
        "recompute_method recompute_num_layers"
    ),
}
"""Fields of TransformerConfig with a flag that takes the same value."""

TRANSFORMER_SWITCHES = {
    "gated_linear_unit": (True, "--swiglu"),
    "add_bias_linear": (False, "--disable-bias-linear"),
    **_switches_on(
        "add_qkv_bias qk_layernorm multi_latent_attention moe_router_pre_softmax "
        "moe_router_enable_expert_bias moe_shared_expert_gate moe_grouped_gemm "
        "sequence_parallel bf16 fp16 calculate_per_token_loss deterministic_mode"
    ),
    "gradient_accumulation_fusion": (False, "--no-gradient-accumulation-fusion"),
    "masked_softmax_fusion": (False, "--no-masked-softmax-fusion"),
    "persist_layer_norm": (False, "--no-persist-layer-norm"),
}
"""Fields of TransformerConfig → the value that a flag implies, and that flag."""

GPT_VALUES = {
    "position_embedding_type": "--position-embedding-type",
    "rotary_percent": "--rotary-percent",
    "vocab_size": "--padded-vocab-size",
}
GPT_SWITCHES = {
    "share_embeddings_and_output_weights": (False, "--untie-embeddings-and-output-weights"),
}

_DDP_SWITCHES = {
    "grad_reduce_in_fp32": (True, "--accumulate-allreduce-grads-in-fp32"),
    **_switches_on("use_distributed_optimizer overlap_grad_reduce overlap_param_gather"),
}

EXCHANGES = {"all_gather": "all_gather", "ulysses": "a2a"}
"""Transformer Engine's words for those of `kernels.context`."""


_LAYOUT_VALUES = _flags(
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size recompute_granularity "
    "recompute_method recompute_num_layers"
)
_LAYOUT_SWITCHES = _switches_on("sequence_parallel bf16 fp16")


def layout_flags(recipe: Recipe, plan: Plan) -> str:
    """The plan's layout as flags of Megatron-LM's scripts, one to a line.

    Raises PlanError where the plan is of another engine, or has no such flags.
    """
    config = BACKENDS[plan.engine].render(recipe, plan.layout)
    if "transformer" not in config:
        raise PlanError(
            f"{recipe.name} runs on the engine {plan.engine}, whose layout Megatron-LM lacks",
            fix="--set parallel.engine=megatron",
        )
    if recipe.parallel.balance != "none":
        raise PlanError(
            f"{recipe.name} has uneven ranks, and Megatron-LM equal ones",
            fix="--set parallel.balance=none",
        )
    layout, transformer = plan.layout, config["transformer"]
    flags = [
        *_values(transformer, _LAYOUT_VALUES),
        *_switches(transformer, _LAYOUT_SWITCHES),
        *(
            (("--recompute-modules", *transformer["recompute_modules"]),)
            if "recompute_modules" in transformer
            else ()
        ),
        *_pipeline_arguments(transformer, layout),
        *_context_arguments(layout),
        *_switches(config.get("ddp", {}), _DDP_SWITCHES),
        ("--micro-batch-size", str(layout.micro_batch)),
        ("--global-batch-size", str(recipe.training.global_batch_size)),
    ]
    return "\n".join(shlex.join(flag) for flag in flags)


def _values(section: Mapping[str, Any], flags: Mapping[str, str]) -> Arguments:
    """A flag with its value for every field that the section sets."""
    for name, flag in flags.items():
        if section.get(name) is not None:
            yield flag, str(section[name])


def _switches(section: Mapping[str, Any], flags: Mapping[str, tuple[bool, str]]) -> Arguments:
    """The flags of the fields whose value the flag implies."""
    for name, (value, flag) in flags.items():
        if section.get(name) is value:
            yield (flag,)


def _pipeline_arguments(transformer: Mapping[str, Any], layout: Layout) -> Arguments:
    """How layers are assigned to stages: evenly, otherwise by megatron-core's layout string.

    In that string every chunk lists its parts: E embedding, t layer, L loss.
    """
    if layout.pp == 1:
        return
    counts = stage_layers(transformer["num_layers"], *layout.division)
    if len(set(counts)) > 1:
        chunks = [f"t*{count}" for count in counts]
        chunks[0], chunks[-1] = f"E{chunks[0]}", f"{chunks[-1]}L"
        yield "--pipeline-model-parallel-layout", "|".join(chunks)
    elif layout.vpp > 1:
        yield "--num-layers-per-virtual-pipeline-stage", str(counts[0])
    if layout.vpp > 1 and transformer["batch_p2p_comm"]:
        yield ("--no-overlap-p2p-communication",)


def _context_arguments(layout: Layout) -> Arguments:
    """How Transformer Engine's attention exchanges keys and values."""
    if layout.cp > 1:
        yield "--cp-comm-type", EXCHANGES[layout.exchange]
