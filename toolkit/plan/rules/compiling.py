"""Whether torch.compile compiles the decoder layers of transformers' models.

Compiled, chains of elementwise operators are one kernel, and fewer of their inputs are kept for
the backward pass; torchtitan's published runs show both.
"""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.hardware.catalogue import accelerator
from toolkit.layout import CompiledParts, Pair, Stage
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import legality
from toolkit.plan.rules.attention import GENERATIONS


def parts(job: PlanRequest, pair: Pair, stage: Stage) -> CompiledParts:
    """The recipe's value; for `auto` the layers, unless there is an `objection`."""
    if job.kernels.compile != "auto":
        return job.kernels.compile
    return "none" if objection(job, pair, stage) else "layers"


def objection(job: PlanRequest, pair: Pair, stage: Stage) -> str:
    """Why `auto` compiles nothing in a ZeRO stage of a pair; empty if it compiles."""
    device = accelerator(job.cluster.gpu)
    if why := _uncompilable(job, pair, stage):
        return why
    if job.kernels.fused == "liger":
        return "Liger's kernels are in their place"
    if device.generation == "cpu":
        return "no published run shows that it pays on CPUs"
    if device.generation not in GENERATIONS:
        return f"no published run shows that it pays on {device.name}"
    if job.spec.generic:
        return f"no test compiles {job.spec.family}"
    return "no published run compiles adapters" if job.adapter else ""


def problems(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """Why `pair` cannot compile the layers that the recipe wants compiled."""
    stages, stage = legality.table()[pair].kernel_stages, job.parallel.zero.stage
    if not stages or job.spec.moe_layers:
        yield Problem(
            "kernels.compile",
            f"layers for {pair}",
            f"auto or none: {_uncompilable(job, pair, stages[0] if stages else 0)}",
            "set kernels.compile to auto",
        )
    elif stage not in ("auto", *stages):
        yield Problem(
            "parallel.zero.stage",
            f"{stage} with kernels.compile: layers",
            f"{', '.join(map(str, stages))} for {pair}: {_GATHERS}",
            "set parallel.zero.stage to auto, or kernels.compile to auto",
        )


_GATHERS = "stage 3 gathers weights inside of a layer"


def _uncompilable(job: PlanRequest, pair: Pair, stage: Stage) -> str:
    stages = legality.table()[pair].kernel_stages
    if not stages:
        by_itself = "megatron-core compiles what it fuses by itself"
        return f"{pair} does not" if pair.model == "hf" else by_itself
    if stage not in stages:
        return _GATHERS
    if job.spec.moe_layers:
        return "which experts a token takes depends on data, which one graph cannot"
    return ""
