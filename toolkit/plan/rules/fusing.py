"""Which fused kernels a decoder layer uses.

megatron-core has one for SwiGLU in each direction (`fused_bias_swiglu.py`), built by
torch.compile; its own training script uses it. Its other fusions need Transformer Engine or
Apex, or compute another function: its gelu is the tanh approximation.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from toolkit.backend import Pair
from toolkit.errors import Problem
from toolkit.hardware.catalogue import accelerator
from toolkit.layout import FusedKernels

if TYPE_CHECKING:
    from toolkit.plan.rules.models import PlanRequest


def whose(job: "PlanRequest", pair: Pair) -> FusedKernels:
    """The recipe's value; for `auto` megatron-core's, unless there is an `objection`."""
    if job.kernels.fused != "auto":
        return job.kernels.fused
    return "none" if objection(job, pair) else "megatron"


def objection(job: "PlanRequest", pair: Pair) -> str:
    """Why `auto` fuses nothing on a pair; empty if it fuses."""
    if why := _unfusable(job, pair):
        return why
    on_cpu = accelerator(job.cluster.gpu).generation == "cpu"
    return "on CPUs nobody measured that it pays" if on_cpu else ""


def problems(job: "PlanRequest", pair: Pair) -> Iterator[Problem]:
    """Why `pair` cannot use the kernels that the recipe states."""
    if job.kernels.fused not in ("auto", "none") and (why := _unfusable(job, pair)):
        yield Problem(
            "kernels.fused",
            f"megatron for {pair}",
            f"auto or none: {why}",
            "set kernels.fused to auto",
        )


def _unfusable(job: "PlanRequest", pair: Pair) -> str:
    if pair.model == "hf":
        return "megatron-core's kernels are for its own layers"
    if job.spec.moe_layers:
        return "experts get other numbers of tokens in every step, and each would be compiled"
    wanted = job.mapped.transformer
    if wanted["activation_func"] != "silu" or not wanted["gated_linear_unit"]:
        return "megatron-core has an exact kernel for SwiGLU only"
    return ""
