"""Which of torch's attention kernels is tried first, or that none is.

torch tries its kernels in a fixed order, FlashAttention-2 first, and uses the first that
supports the inputs, so another order never fails.
"""

from collections.abc import Iterator
from contextlib import suppress

from toolkit.errors import PlanError, Problem
from toolkit.hardware.catalogue import accelerator
from toolkit.layout import AttentionKernel
from toolkit.models.families import attention
from toolkit.plan.request import PlanRequest

GENERATIONS = ("ampere", "ada", "hopper", "blackwell")
"""Which have both kernels."""
LARGEST_HEAD = 128
"""Of cuDNN's backward pass on all of them."""


def kernel(job: PlanRequest) -> AttentionKernel:
    """The recipe's value; for `auto` cuDNN's where it is faster, which is known for Hopper
    (huggingface/transformers#48163: 1.7 to 2.3 times FlashAttention-2 there, slower on Ampere
    and Blackwell)."""
    if job.kernels.attention != "auto":
        return job.kernels.attention
    if attention(job.config) == "eager":
        return "eager"
    return "sdpa" if objection(job) else "cudnn"


def objection(job: PlanRequest) -> str:
    """Why `auto` does not try cuDNN's kernel first; empty where it does."""
    if why := next(_objections(job), ""):
        return why
    gpu = accelerator(job.cluster.gpu)
    if gpu.generation == "cpu":
        return "CPUs have none"
    if gpu.generation != "hopper":
        return f"it is known to be the fastest on Hopper only, and this is {gpu.name}"
    return "it is not deterministic" if job.training.deterministic else ""


def whole_scores(job: PlanRequest) -> bool:
    """Are attention's scores written to memory? Models without attention have none."""
    return kernel(job) == "eager" and job.spec.score_flops > 0


def problems(job: PlanRequest) -> Iterator[Problem]:
    """Why the kernel that the recipe states would never run."""
    asked, gpu = job.kernels.attention, job.cluster.gpu
    if asked in ("auto", "eager") or (asked == "sdpa" and attention(job.config) == "sdpa"):
        return
    objections = [*_objections(job)]
    if asked == "cudnn" and job.training.deterministic:
        # torch's sdp_utils.cpp, `check_cudnn_deterministic`, silently uses another kernel.
        objections.append("it is not deterministic, and training.deterministic is true")
    with suppress(PlanError):  # an unknown accelerator is reported where it is stated
        if accelerator(gpu).generation not in GENERATIONS:
            objections.append(f"cluster.gpu {gpu} has none")
    if objections:
        yield Problem(
            "kernels.attention",
            f"{asked}: {objections[0]}",
            "auto, which takes what there is",
            "set kernels.attention to auto",
        )


def _objections(job: PlanRequest) -> Iterator[str]:
    """Why neither FlashAttention-2 nor cuDNN computes this model's attention."""
    if attention(job.config) != "sdpa":
        yield f"{job.config['model_type']}'s attention is computed by plain products"
    if job.training.precision == "fp32":
        yield "it computes in 16 bits, and training.precision is fp32"
    if job.isolates:
        yield "it takes no mask that isolates documents"
    if job.spec.head_dim > LARGEST_HEAD:
        yield f"heads have {job.spec.head_dim} elements, and it takes {LARGEST_HEAD}"
