"""Renders a plan as arguments of Megatron-LM's own script, `pretrain_gpt.py`.

The content of `megatron.json` as Megatron-LM's flags, one to a line and quoted, so
that `xargs torchrun … pretrain_gpt.py < args.txt` runs it. Nothing is silently dropped: a
setting that affects training and has no flag is a Problem; other settings become notes to the
user.

Flags and their meaning are those of `megatron/training/arguments.py` in Megatron-LM
core_v0.16.1. Its default `--transformer-impl transformer_engine` stays: without Apex, `local`
has no norm that works under sequence parallel. Fusions that DMT's model does not use are off.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.engines.megatron import config as megatron_config
from toolkit.errors import Problem, RecipeError
from toolkit.extras.targets.pretrain_gpt_run import (
    OPTIMIZER_KEYS,
    Arguments,
    run_arguments,
    run_notes,
    run_problems,
    run_values,
)
from toolkit.layout import Layout, head_ranks, stage_layers
from toolkit.models.families import MegatronModel, megatron_model
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe


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

_TRANSFORMER_OTHERS = frozenset(
    # `_model_arguments`, `_pipeline_arguments` and `_fusion_arguments` handle these ...
    ("num_query_groups", "window_size", "window_attn_skip_freq", "moe_layer_freq",
     "no_rope_freq", "recompute_modules", "activation_func", "batch_p2p_comm",
     "bias_activation_fusion",
     "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
     "overlap_p2p_comm",
     # ... Megatron-LM derives these from --bf16 and --fp16, always frees what was sent, and
     # always waits for batched messages.
     "params_dtype", "pipeline_dtype", "deallocate_pipeline_outputs", "batch_p2p_sync")
)  # fmt: skip

GPT_VALUES = {
    "position_embedding_type": "--position-embedding-type",
    "rotary_percent": "--rotary-percent",
    "vocab_size": "--padded-vocab-size",
}
GPT_SWITCHES = {
    "share_embeddings_and_output_weights": (False, "--untie-embeddings-and-output-weights"),
}
_GPT_OTHERS = frozenset(("max_sequence_length", "rotary_base", "rope_parameters"))
"""Handled by `_model_arguments`; `rope_parameters` are llama 3.1's scaling or refused."""

_OPTIMIZER_VALUES = _flags("clip_grad initial_loss_scale min_loss_scale")

_DDP_SWITCHES = {
    "grad_reduce_in_fp32": (True, "--accumulate-allreduce-grads-in-fp32"),
    **_switches_on("use_distributed_optimizer overlap_grad_reduce overlap_param_gather"),
}

EXCHANGES = {
    "all_gather": "all_gather",
    "ulysses": "a2a",
    "ring": "p2p",
    "ulysses_ring": "a2a+p2p",
}
"""Transformer Engine's words for those of `kernels.context`."""

ROPE_SCALING = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""The meaning of `--use-rope-scaling`: Llama 3.1's scaling, whose constants `pretrain_gpt.py`
fixes."""


@dataclass(frozen=True)
class ArgumentList:
    """Arguments for `pretrain_gpt.py`, and what the user still has to do."""

    arguments: tuple[tuple[str, ...], ...]
    """Flags, each with its values."""
    notes: tuple[str, ...]
    """One sentence per topic that the arguments do not cover."""

    @property
    def text(self) -> str:
        """One flag per line, quoted as shells and `xargs` read it."""
        return "\n".join(shlex.join(argument) for argument in self.arguments)


def render(recipe: Recipe, plan: Plan) -> ArgumentList:
    """The arguments that train `recipe` as the engine megatron does.

    Raises RecipeError naming everything that Megatron-LM cannot express.
    """
    model = megatron_model(megatron_config.trained_config(recipe.model))
    layout = plan.layout
    config = megatron_config.render(recipe, layout)
    found = [
        *_model_problems(model, config),
        *_context_problems(config["transformer"], layout),
        *_shares_problems(layout, recipe.parallel.balance),
        *run_problems(recipe),
    ]
    if found:
        raise RecipeError(found)
    arguments = [
        *_model_arguments(config, recipe.training.sequence_length),
        *_pipeline_arguments(config["transformer"], layout),
        *_context_arguments(config["transformer"], layout),
        *_fusion_arguments(config["transformer"]),
        *_switches(config.get("ddp", {}), _DDP_SWITCHES),
        ("--optimizer", config["optimizer"]["optimizer"]),
        *run_values(recipe, plan, OPTIMIZER_KEYS),
        *_values(config["optimizer"], _OPTIMIZER_VALUES),
        *run_arguments(recipe, plan),
    ]
    return ArgumentList(tuple(arguments), tuple(_notes(recipe, layout, model, config)))


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


def _model_arguments(config: Mapping[str, Any], sequence_length: int) -> Arguments:
    transformer, gpt = config["transformer"], config["gpt"]
    yield from _values(transformer, TRANSFORMER_VALUES)
    yield from _switches(transformer, TRANSFORMER_SWITCHES)
    groups = transformer["num_query_groups"]
    if groups != transformer["num_attention_heads"]:
        yield ("--group-query-attention",)
        yield "--num-query-groups", str(groups)
    if "window_size" in transformer:
        yield "--window-size", ",".join(str(tokens) for tokens in transformer["window_size"])
    for name in ("window_attn_skip_freq", "moe_layer_freq", "no_rope_freq"):
        if name in transformer:
            pattern = ",".join(str(one) for one in transformer[name])
            yield f"--{name.replace('_', '-')}", f"[{pattern}]"
    if "recompute_modules" in transformer:
        yield "--recompute-modules", *transformer["recompute_modules"]
    yield from _values(gpt, GPT_VALUES)
    if "rope_parameters" in gpt:
        yield ("--use-rope-scaling",)
    yield from _switches(gpt, GPT_SWITCHES)
    if "rotary_base" in gpt:
        yield "--rotary-base", str(int(gpt["rotary_base"]))
    # Rotary positions may exceed the config's; Megatron-LM requires the number.
    positions = max(gpt["max_sequence_length"], sequence_length)
    yield "--max-position-embeddings", str(positions)
    yield "--make-vocab-size-divisible-by", "1"  # times the tensor-parallel degree


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


def _context_arguments(transformer: Mapping[str, Any], layout: Layout) -> Arguments:
    """How Transformer Engine's attention exchanges keys and values: nested, by heads inside."""
    if layout.cp > 1:
        yield "--cp-comm-type", EXCHANGES[layout.exchange]
    if layout.exchange == "ulysses_ring":
        heads = head_ranks(layout.exchange, layout.cp, _key_heads(transformer, layout))
        yield "--hierarchical-context-parallel-sizes", str(heads), str(layout.cp // heads)


def _context_problems(transformer: Mapping[str, Any], layout: Layout) -> Iterator[Problem]:
    """What Transformer Engine's attention asserts."""
    exchange, allowed = layout.exchange, ""
    if "window_size" in transformer and "p2p" in EXCHANGES[exchange]:
        allowed = "all_gather or ulysses with a window"
    elif exchange == "ulysses" and _key_heads(transformer, layout) % layout.cp:
        allowed = "all_gather or ring, where parallel.context does not divide the keys' heads"
    if allowed:
        yield Problem(
            "kernels.context",
            exchange,
            f"in Megatron-LM, {allowed}",
            "set kernels.context to all_gather",
        )


def _shares_problems(layout: Layout, balance: str) -> Iterator[Problem]:
    if balance != "none":
        allowed, fix = "in Megatron-LM, none", "set parallel.balance to none"
        yield Problem("parallel.balance", balance, allowed, fix)
    if layout.shares:
        found, allowed = str([*layout.shares]), "in Megatron-LM, []: ranks have equal ones"
        yield Problem("parallel.shares", found, allowed, "set parallel.shares to []")


def _key_heads(transformer: Mapping[str, Any], layout: Layout) -> int:
    return max(1, int(transformer["num_query_groups"]) // layout.tp)


def _fusion_arguments(transformer: Mapping[str, Any]) -> Arguments:
    # Megatron-LM's fused gelu is the tanh approximation, its plain one is exact.
    if transformer["activation_func"] != "gelu_tanh":
        yield ("--no-bias-gelu-fusion",)
    if not transformer["bias_activation_fusion"]:
        yield ("--no-bias-swiglu-fusion",)
    yield ("--no-bias-dropout-fusion",)
    yield ("--no-rope-fusion",)
    yield ("--attention-softmax-in-fp32",)


def _model_problems(model: MegatronModel, config: Mapping[str, Any]) -> Iterator[Problem]:
    """Parts of the model that `pretrain_gpt.py` cannot express."""
    transformer, gpt = config["transformer"], config["gpt"]
    activation, gated = transformer["activation_func"], transformer["gated_linear_unit"]
    scaled = model.residual_scale != 1 or model.logits_divisor != 1
    plain_tanh = activation == "gelu_tanh" and not transformer["add_bias_linear"]
    rope, theta = gpt.get("rope_parameters", ROPE_SCALING), gpt.get("rotary_base", 0)
    other = next((name for name, one in ROPE_SCALING.items() if rope.get(name) != one), "")
    constants = ", ".join(f"{key}: {value}" for key, value in ROPE_SCALING.items())
    rows: list[tuple[object, str, str]] = [
        (model.parallel_residual, "a parallel residual (use_parallel_residual)",
         "layers whose MLP reads what attention returns"),
        (model.norms != "before", "norms after attention and MLP", "norms come before them"),
        (model.norms_over_width, "query and key norms over all heads",
         "they are over each head"),
        (model.score_cap or model.logit_cap, "soft-capping",
         "scores and logits are not capped"),
        (model.chunked_layers is not None, "chunked attention",
         "a query sees all the past, or a window of it"),
        (model.embedding_scale != 1, f"embeddings times {model.embedding_scale:g}",
         "they are not scaled"),
        (scaled, "scaled residual branches or logits (residual_multiplier, logits_scaling)",
         "neither is scaled"),
        (gated != (activation == "silu"),
         f"a {'gated' if gated else 'plain'} MLP with {activation}",
         "a gated MLP with silu or a plain one with gelu"),
        (plain_tanh and not gated, "gelu_tanh without bias",
         "gelu_tanh is fused with the MLP's bias"),
        (other, f"rope_type {rope.get('rope_type')} with {other}: {rope.get(other)}",
         f"no rope scaling, or Llama 3.1's ({constants})"),
        (theta % 1, f"rope_theta {theta}", "a whole number"),
    ]  # fmt: skip
    expressed = {*TRANSFORMER_VALUES, *TRANSFORMER_SWITCHES, *_TRANSFORMER_OTHERS}
    expressed |= {*GPT_VALUES, *GPT_SWITCHES, *_GPT_OTHERS}
    rows += [
        (True, f"what needs megatron-core's {name}", "no argument expresses this")
        for name in (*transformer, *gpt)
        if name not in expressed
    ]
    for is_refused, found, allowed in rows:
        if is_refused:
            fix = "train it with `dmt launch`"
            yield Problem("model.config", found, f"in Megatron-LM, {allowed}", fix)


def _notes(
    recipe: Recipe, layout: Layout, model: MegatronModel, config: Mapping[str, Any]
) -> Iterable[str]:
    vocabulary, padded = model.gpt["vocab_size"], config["gpt"]["vocab_size"]
    if padded != vocabulary:
        yield (
            f"the {padded - vocabulary} rows that pad the vocabulary take part in "
            "Megatron-LM's softmax; in DMT's loss they do not"
        )
    if layout.offload_activations:
        yield "not passed on: parallel.offload_activations; it keeps them on the GPU"
    if layout.mlp == "tiled":
        yield "not passed on: kernels.mlp; its MLPs are not tiled"
    if layout.tp > 1:
        yield "on GPUs before Blackwell, set CUDA_DEVICE_MAX_CONNECTIONS=1"
    yield from run_notes(recipe)
