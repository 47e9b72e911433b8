"""Which of torch's attention kernels is tried first, or that none is.

torch tries its kernels in a fixed order, FlashAttention-2 first, and uses the first that
supports the inputs, so another order never fails. The kernel for documents of different lengths
(`varlen`) has a function of its own.
"""

from collections.abc import Iterator
from contextlib import suppress

from toolkit.errors import PlanError, Problem
from toolkit.layout import AttentionKernel, ModelName, Pair
from toolkit.models.families import attention
from toolkit.models.model import is_attention_dropout
from toolkit.plan.dimensions import is_above_one
from toolkit.plan.hardware.catalogue import accelerator
from toolkit.plan.request import PlanRequest

GENERATIONS = ("ampere", "ada", "hopper", "blackwell")
"""GPU generations that have both kernels."""
LARGEST_HEAD = 128
"""Largest head of cuDNN's backward pass on all of them."""
LARGEST_FLASH_HEAD = 256
"""Largest head of FlashAttention-2, to which the kernel for lengths belongs."""


def kernel(job: PlanRequest) -> AttentionKernel:
    """The recipe's value, or what `auto` chooses."""
    return choice(job)[0]


def choice(job: PlanRequest) -> tuple[AttentionKernel, str]:
    """The kernel, and why.

    `auto`: the one for lengths where documents are isolated. Otherwise cuDNN's where it is
    faster, which is known for Hopper (an H100 here: 1.7 to 2.0 times FlashAttention-2 for 8,192
    tokens and more, docs/how-it-is-tested.md; slower on Ampere and Blackwell,
    huggingface/transformers#48163). With context parallel it is the one for lengths, which
    takes the parts of documents that a rank has.
    """
    if is_above_one(job.parallel.context):
        return "varlen", "it takes the parts of rows that parallel.context leaves on a rank"
    if job.kernels.attention != "auto":
        return job.kernels.attention, "asked for"
    wanted: AttentionKernel = "varlen" if job.isolates else "cudnn"
    if attention(job.config) == "eager":
        return "eager", f"auto; not {wanted}: {next(_objections(job, wanted))}"
    if why := next(_objections(job, wanted), ""):
        return "sdpa", f"auto; not {wanted}: {why}"
    if job.isolates:
        return wanted, "auto, as documents are isolated: it needs no mask"
    if (gpu := accelerator(job.cluster.gpu)).generation != "hopper":
        slower = f"it is known to be the fastest on Hopper only, and this is {gpu.name}"
        return "sdpa", f"auto; not {wanted}: {slower}"
    return wanted, "auto, the fastest on Hopper"


def whole_scores(job: PlanRequest) -> bool:
    """Are attention's scores written to memory? Models without attention have none."""
    return kernel(job) == "eager" and job.spec.score_flops > 0


def problems(job: PlanRequest) -> Iterator[Problem]:
    """Why the kernel that the recipe states would never run."""
    asked = job.kernels.attention
    if (
        is_above_one(job.parallel.context)
        or asked in ("auto", "eager")
        or (asked == "sdpa" and attention(job.config) == "sdpa")
    ):
        return
    if why := next(_objections(job, asked), ""):
        yield Problem(
            "kernels.attention",
            f"{asked}: {why}",
            "auto, which takes what there is",
            "set kernels.attention to auto",
        )


def context_problems(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """What keeps the kernel for lengths from computing the parts of rows on a context rank."""
    asked, degree = job.kernels.attention, job.parallel.context
    if not is_above_one(degree):
        return
    if asked not in ("auto", "varlen"):
        yield Problem(
            "kernels.attention",
            f"{asked} with parallel.context: {degree}",
            "auto or varlen, the one kernel that takes parts of rows",
            "set kernels.attention to auto, or parallel.context to 1",
        )
    elif why := next(_objections(job, "varlen", pair.model), ""):
        yield Problem(
            "parallel.context",
            f"{degree} with attention varlen: {why}",
            "1",
            "set parallel.context to 1",
        )


def _objections(job: PlanRequest, kernel: str, model: ModelName = "hf") -> Iterator[str]:
    """Why a kernel computes no attention of this model, or none on this device."""
    if kernel == "varlen":
        yield from _lengths_objections(job, model)
    else:
        if attention(job.config) != "sdpa":
            yield f"{job.config['model_type']}'s attention is computed by plain products"
        if job.training.precision == "fp32":
            yield "it computes in 16 bits, and training.precision is fp32"
        if job.isolates:
            yield "it takes no mask that isolates documents"
        if job.spec.head_dim > LARGEST_HEAD:
            yield f"heads have {job.spec.head_dim} elements, and it takes {LARGEST_HEAD}"
    with suppress(PlanError):  # an unknown accelerator is reported where it is stated
        gpu = accelerator(job.cluster.gpu)
        if gpu.generation not in GENERATIONS and (kernel, gpu.name) != ("varlen", "cpu"):
            yield f"cluster.gpu {gpu.name} has none"
    if (
        kernel in ("cudnn", "varlen")
        and job.training.deterministic
        and job.cluster.gpu != "cpu"
    ):
        # torch's sdp_utils.cpp, `check_cudnn_deterministic`, silently uses another kernel.
        yield "it is not deterministic, and training.deterministic is true"


def _lengths_objections(job: PlanRequest, model: ModelName = "hf") -> Iterator[str]:
    """Why the kernel for documents of different lengths does not compute this attention. On
    CPUs, where there is none, documents are attended to one after the other."""
    config, on_cpu = job.config, job.cluster.gpu == "cpu"
    spread = is_above_one(job.parallel.context)  # then a build compares, whatever the type
    if not job.isolates and not spread:
        yield "documents are not isolated (data.isolate_documents)"
    if attention(config) != "sdpa" and not (spread and on_cpu):
        yield f"{config['model_type']}'s attention is computed by plain products"
    if job.spec.generic and not spread:
        yield f"no test computes {config['model_type']} without a mask"
    if job.spec.chunked and job.spec.sliding_layers and model == "hf":
        yield f"{config['model_type']}'s attention in chunks needs a mask"
    if on_cpu and job.kernels.compile == "layers" and not spread:
        yield "on CPUs its loop over documents is not compiled (kernels.compile)"
    dropped = any(value for key, value in config.items() if is_attention_dropout(key))
    if dropped and not spread:
        yield "it has no dropout"
    if not on_cpu and job.training.precision == "fp32":
        yield "it computes in 16 bits, and training.precision is fp32"
    if not on_cpu and job.spec.head_dim > LARGEST_FLASH_HEAD:
        yield f"heads have {job.spec.head_dim} elements, and it takes {LARGEST_FLASH_HEAD}"
