"""How megatron-core's layers compute the experts of a rank: in turn, or as grouped products.

A grouped product (torch's `grouped_mm`) is one kernel for all experts, and takes their weights
stacked: a copy in each pass. In turn, the host starts some thirty kernels per expert, which is
as fast where the products of each take longer than that.
"""

from collections.abc import Iterator

from toolkit.errors import Problem
from toolkit.hardware.catalogue import accelerator
from toolkit.layout import ExpertProducts, Pair
from toolkit.plan.request import PlanRequest
from toolkit.recipe.schema import ParallelSection

GENERATIONS = ("hopper", "blackwell")
"""Of which CUTLASS has the grouped product, in bf16 alone (GroupedMM.cu); elsewhere torch
computes group after group and waits for the offsets."""
WITHOUT = ("rtx5090",)
"""Of them, those with compute capability 12, not 10."""
START_S = 2e-4
"""What the host needs to start one expert's forward and backward pass: measured, 29 ms for 128
experts of 16 × 16 on one core of a CPU."""
MULTIPLE = 8
"""Rows of 16 bytes, which the kernels want, have a multiple of these elements."""


def products(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> ExpertProducts:
    """What the recipe states; for `auto` grouped ones, unless there is an `objection`."""
    if job.kernels.experts != "auto":
        return job.kernels.experts
    return "sequential" if objection(job, pair, parallel) else "grouped"


def objection(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> str:
    """Why `auto` groups nothing in a settled layout; empty where it does."""
    if why := _ungroupable(job, pair, parallel):
        return why
    gpu, precision = accelerator(job.cluster.gpu), job.training.precision
    if gpu.generation not in GENERATIONS or gpu.name in WITHOUT or precision != "bf16":
        return f"torch has a grouped kernel for bf16 on {' and '.join(GENERATIONS)} alone"
    if job.spec.experts == _number(parallel.expert):
        return "a rank has one expert"
    if (seconds := _products_s(job, parallel)) > START_S:
        return f"an expert's products take {seconds * 1e3:.2g} ms, longer than to start them"
    return ""


def reason(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> str:
    """Why `auto` decides as it does."""
    why = objection(job, pair, parallel)
    return why or (
        f"an expert's products take {_products_s(job, parallel) * 1e3:.2g} ms, "
        f"to start them {START_S * 1e3:g} ms"
    )


def problems(job: PlanRequest, pair: Pair) -> Iterator[Problem]:
    """Why `pair` cannot compute experts as the recipe states."""
    asked = job.kernels.experts
    why = ""
    if asked == "grouped":
        why = _ungroupable(job, pair, job.parallel)
    elif asked == "sequential" and pair.model == "hf":
        why = "transformers' models choose it by themselves"
    if why:
        yield Problem(
            "kernels.experts",
            f"{asked} for {pair}",
            f"auto: {why}",
            "set kernels.experts to auto",
        )


def _ungroupable(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> str:
    if pair.model == "hf":
        return "transformers' models choose it by themselves"
    if not job.spec.moe_layers:
        return "the model has no experts"
    model = job.mapped.transformer
    if model["add_bias_linear"]:
        return "its experts have biases, which grouped products lack"
    if model.get("moe_apply_probs_on_input"):
        return "its experts' inputs are weighted, not their outputs"
    for size in (job.spec.hidden, _inner(job, parallel)):
        if size % MULTIPLE:
            return f"the kernels want sizes that {MULTIPLE} divides, and an expert has {size:g}"
    return ""


def _inner(job: PlanRequest, parallel: ParallelSection) -> float:
    """The intermediate size of an expert on a rank: split where experts are not spread."""
    spread = _number(parallel.expert) > 1
    return job.spec.expert_intermediate / (1 if spread else _number(parallel.tensor))


def _products_s(job: PlanRequest, parallel: ParallelSection) -> float:
    """Seconds of one expert's forward and backward pass at the peak, of evenly routed tokens of
    a micro batch; of one sample where its size is open."""
    spec, training = job.spec, job.training
    samples = _number(training.micro_batch_size) * training.rows_per_sample
    tokens = samples * training.sequence_length * spec.experts_per_token / spec.experts
    weights = (3 if spec.gated_mlp else 2) * spec.hidden * _inner(job, parallel)
    flops = 6 * tokens * _number(parallel.expert) * weights
    return flops / (accelerator(job.cluster.gpu).bf16 or 1.0)


def _number(asked: int | str) -> int:
    """The least that `auto` may become."""
    return asked if isinstance(asked, int) else 1
