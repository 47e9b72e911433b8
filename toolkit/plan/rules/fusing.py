"""Which fused kernels a decoder layer uses.

megatron-core has one for SwiGLU in each direction (`fused_bias_swiglu.py`), built by
torch.compile; its own training script uses it. Its other fusions need Transformer Engine or
Apex, or compute another function: its gelu is the tanh approximation. Liger's, for
transformers' models, are written in Triton; no run has shown their gain, so only the recipe
chooses them.
"""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.features.base import excluding
from toolkit.hardware.catalogue import accelerator
from toolkit.layout import FusedKernels, Pair
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import legality

LIGER_FAMILIES = (
    "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3",
)  # fmt: skip
"""Model types that the tests compare with Liger's kernels and without. In each of them, Liger
replaces every norm, the rotary positions and, without experts, every MLP."""


def whose(job: PlanRequest, pair: Pair) -> FusedKernels:
    """The recipe's value; for `auto` megatron-core's, unless there is an `objection`."""
    if job.kernels.fused != "auto":
        return job.kernels.fused
    return "none" if objection(job, pair) else "megatron"


def objection(job: PlanRequest, pair: Pair) -> str:
    """Why `auto` fuses nothing on a pair; empty if it fuses."""
    if why := _not_by_megatron(job, pair):
        return why
    on_cpu = accelerator(job.cluster.gpu).generation == "cpu"
    return "on CPUs nobody measured that it pays" if on_cpu else ""


def problems(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """Why `pair` cannot use the kernels that the recipe states."""
    asked = job.kernels.fused
    if asked in ("auto", "none"):
        return
    why = _not_by_liger(job, pair) if asked == "liger" else _not_by_megatron(job, pair)
    if why:
        yield Problem(
            "kernels.fused",
            f"{asked} for {pair}",
            f"auto or none: {why}",
            "set kernels.fused to auto",
        )


def _not_by_liger(job: PlanRequest, pair: Pair) -> str:
    if pair.model != "hf" or not legality.table()[pair].kernel_stages:
        return "Liger's kernels are for transformers' models on ddp, fsdp and deepspeed"
    if accelerator(job.cluster.gpu).generation == "cpu":
        return "Liger's kernels are written in Triton, which needs a GPU"
    if job.spec.family not in LIGER_FAMILIES:
        return f"no test runs {job.spec.family} with Liger's kernels"
    activation = "gelu_tanh" if job.spec.family.startswith("gemma") else "silu"
    if not job.spec.moe_layers and job.mapped.transformer["activation_func"] != activation:
        return f"Liger's MLP of {job.spec.family} computes {activation}"
    if job.kernels.compile == "layers":
        return "kernels.compile: layers fuses the same operators"
    if untested := excluding("liger", job.features):
        return f"no test runs {untested[0]} with Liger's kernels"
    return ""


def _not_by_megatron(job: PlanRequest, pair: Pair) -> str:
    if pair.model == "hf":
        return "megatron-core's kernels are for its own layers"
    if job.spec.moe_layers:
        return "experts get other numbers of tokens in every step, and each would be compiled"
    wanted = job.mapped.transformer
    if wanted["activation_func"] != "silu" or not wanted["gated_linear_unit"]:
        return "megatron-core has an exact kernel for SwiGLU only"
    return ""
