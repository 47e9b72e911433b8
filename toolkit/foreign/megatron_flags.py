"""`dmt plan --flags megatron-lm`: the layout of a plan as flags of Megatron-LM core_v0.16.1."""

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.backend import BACKENDS
from toolkit.errors import PlanError
from toolkit.layout import Layout, stage_layers
from toolkit.plan.plan import Plan
from toolkit.recipe.schema import Recipe

_EXCHANGES = {"all_gather": "all_gather", "ulysses": "a2a"}
"""`kernels.context` → Transformer Engine's word."""
_VALUES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "recompute_granularity"),
    *("recompute_method", "recompute_num_layers"),
)
_SWITCHES = {
    name: f"--{name.replace('_', '-')}" for name in ("sequence_parallel", "bf16", "fp16")
}
_DDP_SWITCHES = {
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "use_distributed_optimizer": "--use-distributed-optimizer",
    "overlap_grad_reduce": "--overlap-grad-reduce",
    "overlap_param_gather": "--overlap-param-gather",
}


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
    return "\n".join(shlex.join(flag) for flag in _flags(recipe, plan.layout, config))


def _flags(
    recipe: Recipe, layout: Layout, config: Mapping[str, Any]
) -> Iterator[tuple[str, ...]]:
    transformer = config["transformer"]
    for name in _VALUES:
        if transformer.get(name) is not None:
            yield f"--{name.replace('_', '-')}", str(transformer[name])
    for section, switches in (transformer, _SWITCHES), (config.get("ddp", {}), _DDP_SWITCHES):
        yield from ((flag,) for name, flag in switches.items() if section.get(name) is True)
    if "recompute_modules" in transformer:
        yield "--recompute-modules", *transformer["recompute_modules"]
    counts = stage_layers(transformer["num_layers"], *layout.division)
    if layout.pp > 1 and len(set(counts)) > 1:  # E embedding, t layer, L loss
        chunks = "|".join(f"t*{count}" for count in counts)
        yield "--pipeline-model-parallel-layout", f"E{chunks}L"
    elif layout.vpp > 1:
        yield "--num-layers-per-virtual-pipeline-stage", str(counts[0])
    if layout.cp > 1:
        yield "--cp-comm-type", _EXCHANGES[layout.exchange]
    yield "--micro-batch-size", str(layout.micro_batch)
    yield "--global-batch-size", str(recipe.training.global_batch_size)
