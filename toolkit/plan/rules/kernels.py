"""What `kernels` leaves to the planner: compiled layers, fused kernels, products of experts.

Of each: the recipe's value, for `auto` what pays unless there is an `objection`, and why a pair
of engine and model cannot do what the recipe states.
"""

from collections.abc import Iterator
from contextlib import suppress

from toolkit.errors import PlanError, Problem
from toolkit.layout import CompiledParts, ExpertProducts, FusedKernels, Pair, Stage
from toolkit.plan.dimensions import is_above_one
from toolkit.plan.hardware.catalogue import Gpu, accelerator
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import legality
from toolkit.plan.rules.attention import GENERATIONS
from toolkit.plan.rules.context import FP8_BLOCK
from toolkit.plan.rules.legality import Rule, degree
from toolkit.recipe.schema import ParallelSection, Recipe

# torch.compile on the decoder layers of transformers' models. Compiled, chains of elementwise
# operators are one kernel, and fewer of their inputs are kept for the backward pass;
# torchtitan's published runs show both.

_GATHERS = "stage 3 gathers weights inside of a layer"


def compiled(job: PlanRequest, pair: Pair, stage: Stage) -> CompiledParts:
    """What torch.compile compiles."""
    if job.kernels.compile != "auto":
        return job.kernels.compile
    return "none" if compile_objection(job, pair, stage) else "layers"


def compile_objection(job: PlanRequest, pair: Pair, stage: Stage) -> str:
    """Why `auto` compiles nothing in a ZeRO stage of a pair. Empty if it compiles."""
    device = accelerator(job.cluster.gpu)
    if why := _uncompilable(job, pair, stage):
        return why
    if job.kernels.fused == "liger":
        return "Liger's kernels are in their place"
    if device.generation not in GENERATIONS:
        return f"no published run shows that it pays on {device.name}"
    if job.spec.generic:
        return f"no test compiles {job.spec.family}"
    return "no published run compiles adapters" if job.adapter else ""


def _uncompilable(job: PlanRequest, pair: Pair, stage: Stage) -> str:
    stages = legality.table()[pair].kernel_stages
    if not stages:
        by_itself = "megatron-core compiles what it fuses by itself"
        return f"{pair} does not" if pair.model == "hf" else by_itself
    if stage not in stages:
        return _GATHERS
    if pair.model == "hf" and is_above_one(job.parallel.tensor):
        return "no test compiles layers that tensor parallel splits"
    if is_above_one(job.parallel.context):
        return "no test compiles layers whose rows are spread over ranks"
    if job.spec.moe_layers:
        return "which experts a token takes depends on data, which one graph cannot"
    return ""


# Fused kernels of a decoder layer. megatron-core has one for SwiGLU in each direction
# (`fused_bias_swiglu.py`), built by torch.compile; its own training script uses it. Its other
# fusions need Transformer Engine or Apex, or compute another function: its gelu is the tanh
# approximation. Liger's, for transformers' models, are written in Triton; no run has shown
# their gain, so only the recipe chooses them.

LIGER_FAMILIES = (
    "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "phi3", "qwen2", "qwen3",
    "qwen3_moe", "smollm3",
)  # fmt: skip
"""Model types that the tests compare with Liger's kernels and without. In each of them, Liger
replaces every norm, the rotary positions and, without experts, every MLP."""


def fused(job: PlanRequest, pair: Pair) -> FusedKernels:
    """Whose fused kernels run."""
    if job.kernels.fused != "auto":
        return job.kernels.fused
    return "none" if fused_objection(job, pair) else "megatron"


def fused_objection(job: PlanRequest, pair: Pair) -> str:
    """Why `auto` fuses nothing on a pair. Empty if it fuses."""
    if why := _not_by_megatron(job, pair):
        return why
    on_cpu = accelerator(job.cluster.gpu).generation == "cpu"
    return "on CPUs nobody measured that it pays" if on_cpu else ""


def _without_liger(job: PlanRequest, pair: Pair) -> str:
    if pair.model != "hf" or not legality.table()[pair].kernel_stages:
        return "Liger's kernels are for transformers' models on ddp, fsdp and deepspeed"
    if accelerator(job.cluster.gpu).generation == "cpu":
        return "Liger's kernels are written in Triton, which needs a GPU"
    if job.spec.family not in LIGER_FAMILIES:
        return f"no test runs {job.spec.family} with Liger's kernels"
    if job.kernels.fp8 is not None:
        return "no test runs fp8 with Liger's kernels"
    split = [name for name in ("tensor", "context") if degree(getattr(job.parallel, name)) > 1]
    return f"no test runs {split[0]} parallel with them" if split else ""


def _no_liger_loss(job: PlanRequest, pair: Pair) -> str:
    if why := _without_liger(job, pair):
        return why
    if job.spec.capped_logits or job.mapped.logits_divisor != 1:
        return f"{job.spec.family} changes logits before their loss, which Liger's kernel skips"
    return ""


def _not_by_liger(job: PlanRequest, pair: Pair) -> str:
    if why := _without_liger(job, pair):
        return why
    activation = "gelu_tanh" if job.spec.family.startswith("gemma") else "silu"
    if not job.spec.moe_layers and job.mapped.transformer["activation_func"] != activation:
        return f"Liger's MLP of {job.spec.family} computes {activation}"
    if job.kernels.compile == "layers":
        return "kernels.compile: layers fuses the same operators"
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


# Products in 8 bits, by torchao in transformers' dense models (`models/fp8.py`).

_NO_FP8 = "or set kernels.fp8 to null"


def fp8_settings(recipe: Recipe) -> Iterator[Problem]:
    """Settings that products in 8 bits do not suit, in any layout."""
    if recipe.kernels.fp8 is None:
        return
    with suppress(PlanError):  # reported by the rule about `cluster.gpu`
        yield from _fp8_device(recipe.training.precision, accelerator(recipe.cluster.gpu))
    key, length = "training.sequence_length", recipe.training.sequence_length
    if length % FP8_BLOCK:
        allowed = f"a multiple of {FP8_BLOCK} with fp8, which GPUs multiply in blocks"
        fix = f"set {key} to {-(-length // FP8_BLOCK) * FP8_BLOCK}, {_NO_FP8}"
        yield Problem(key, f"{length} with fp8", allowed, fix)
    if recipe.adapter is not None:
        found, fix = f"{recipe.kernels.fp8} with an adapter", f"remove adapter, {_NO_FP8}"
        yield Problem("kernels.fp8", found, "null with an adapter", fix)


def _fp8_device(precision: str, device: Gpu) -> Iterator[Problem]:
    on_cpu = device.generation == "cpu"
    if precision != "bf16" and not (on_cpu and precision == "fp32"):
        yield Problem(
            "training.precision",
            f"{precision} with fp8",
            "bf16 with fp8 (on CPUs, where 8 bits are emulated, also fp32)",
            f"set training.precision to bf16, {_NO_FP8}",
        )
    if not on_cpu and device.fp8 is None:
        found = f"{device.name} with fp8, for which it has no units"
        fix = "set kernels.fp8 to null"
        yield Problem("cluster.gpu", found, "a GPU from Ada or Hopper on", fix)


def _not_in_8_bits(job: PlanRequest, pair: Pair) -> str:
    if job.kernels.fp8 is None:
        return ""
    if not legality.table()[pair].kernel_stages:
        return "megatron-core's models compute it by Transformer Engine"
    experts = "experts' weights are stacked, and torchao's products take single ones"
    return experts if job.spec.moe_layers else ""


# How the experts of a rank are computed: in turn, or as grouped products. A grouped product
# (torch's `grouped_mm`) is one kernel for all experts, and takes their weights stacked.
#
# megatron-core's layers have a weight for each expert, so that stacking is a copy in each pass.
# In turn, the host starts some thirty kernels per expert, which is as fast where the products
# of each take longer than that.
#
# transformers' layers have stacked weights. In turn, the gradient of each expert is a stack of
# zeros with one part filled, and all are added up: bytes that grow with the square of the
# number of experts. Grouped products are faster on every device, also where they are a loop.

GROUPED = ("hopper", "blackwell")
"""GPU generations for which CUTLASS has the grouped product, in bf16 only (GroupedMM.cu).
Elsewhere torch computes group after group and waits for the offsets."""
WITHOUT = ("rtx5090",)
"""GPUs of these generations with compute capability 12, not 10."""
START_S = 2e-4
"""Seconds that the host needs to start an expert's forward and backward pass. Measured: 29 ms
for 128 experts of 16 × 16 on one core of a CPU."""
MULTIPLE = 8
"""Rows of 16 bytes, which the kernels want, have a multiple of these elements in 16 bits."""
OWN_PRODUCTS = ("jetmoe", "llama4_text", "longcat_flash")
"""Model types whose experts transformers computes in a way of their own."""


def expert_products(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> ExpertProducts:
    """How a settled layout computes experts."""
    if job.kernels.experts != "auto":
        return job.kernels.experts
    return "sequential" if experts_objection(job, pair, parallel) else "grouped"


def experts_objection(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> str:
    """Why `auto` groups nothing in a settled layout. Empty where it does."""
    if why := _ungroupable(job, pair, parallel):
        return why
    if pair.model == "hf":
        return ""
    gpu, precision = accelerator(job.cluster.gpu), job.training.precision
    if gpu.generation not in GROUPED or gpu.name in WITHOUT or precision != "bf16":
        return f"torch has a grouped kernel for bf16 on {' and '.join(GROUPED)} alone"
    if job.spec.experts == degree(parallel.expert):
        return "a rank has one expert"
    seconds = _products_s(job, parallel)
    if seconds <= START_S:
        return ""
    return f"an expert's products take {seconds * 1e3:.2g} ms, longer than to start them"


def _ungroupable(job: PlanRequest, pair: Pair, parallel: ParallelSection) -> str:
    if not job.spec.moe_layers:
        return "the model has no experts"
    if pair.model == "hf":
        if job.spec.family in OWN_PRODUCTS:
            return f"transformers has no grouped products for the experts of {job.spec.family}"
    elif job.mapped.transformer.get("add_bias_linear"):
        return "its experts have biases, which grouped products lack"
    single = pair.model == "hf" and job.training.precision == "fp32"
    multiple = MULTIPLE // 2 if single else MULTIPLE
    for size in (job.spec.hidden, _inner(job, parallel)):
        if size % multiple:
            return f"the kernels want sizes that {multiple} divides, and an expert has {size:g}"
    adapters = job.spec.adapters if pair.model != "hf" else None
    if job.adapter and adapters and adapters.experts and job.adapter.rank % MULTIPLE:
        return f"the kernels want ranks that {MULTIPLE} divides, and its adapters have another"
    return ""


def _inner(job: PlanRequest, parallel: ParallelSection) -> float:
    """The intermediate size of an expert on a rank: split where experts are not spread."""
    spread = degree(parallel.expert) > 1
    return job.spec.expert_intermediate / (1 if spread else degree(parallel.tensor))


def _products_s(job: PlanRequest, parallel: ParallelSection) -> float:
    """Seconds of one expert's forward and backward pass at the peak, with evenly routed tokens
    of a micro batch. If its size is open, of one sample."""
    spec, training = job.spec, job.training
    samples = degree(training.micro_batch_size) * training.rows_per_sample
    tokens = samples * training.sequence_length * spec.experts_per_token / spec.experts
    weights = (3 if spec.gated_mlp else 2) * spec.hidden * _inner(job, parallel)
    flops = 6 * tokens * degree(parallel.expert) * weights
    return flops / (accelerator(job.cluster.gpu).bf16 or 1.0)


def _other_stage(job: PlanRequest, pair: Pair) -> bool:
    """Whether a stage is stated in which the pair neither compiles layers nor has fp8."""
    stages = legality.table()[pair].kernel_stages
    return bool(stages) and job.parallel.zero.stage not in ("auto", *stages)


def _not_compiled(job: PlanRequest, pair: Pair) -> str:
    """Why stated `layers` are not compiled, whatever the stage."""
    stages = legality.table()[pair].kernel_stages
    if job.kernels.compile != "layers":
        return ""
    split = is_above_one(job.parallel.context)
    if not stages or job.spec.moe_layers or split:
        return _uncompilable(job, pair, stages[0] if stages else 0)
    return ""


def _not_fused(job: PlanRequest, pair: Pair) -> str:
    if job.kernels.fused in ("auto", "none"):
        return ""
    return (_not_by_liger if job.kernels.fused == "liger" else _not_by_megatron)(job, pair)


_HERE = "{value} for {p}"
RULES = (
    Rule("kernels.compile", _not_compiled, "auto or none: {why}", found=_HERE),
    Rule(
        "parallel.zero.stage",
        lambda j, p: (
            j.kernels.compile == "layers" and not _not_compiled(j, p) and _other_stage(j, p)
        ),
        f"another with kernels.compile: layers for {{p}}: {_GATHERS}",
        "set parallel.zero.stage to auto, or kernels.compile to auto",
    ),
    Rule("kernels.fp8", _not_in_8_bits, "null: {why}", "set kernels.fp8 to null", _HERE),
    Rule(
        "parallel.zero.stage",
        lambda j, p: j.kernels.fp8 is not None and _other_stage(j, p),
        "another with kernels.fp8 for {p}",
        f"set parallel.zero.stage to auto, {_NO_FP8}",
    ),
    Rule("kernels.fused", _not_fused, "auto or none: {why}", found=_HERE),
    Rule(
        "kernels.loss",
        lambda j, p: j.kernels.loss == "liger" and _no_liger_loss(j, p),
        "auto, whole or chunked: {why}",
        found=_HERE,
    ),
    Rule(
        "kernels.experts",
        lambda j, p: j.kernels.experts == "grouped" and _ungroupable(j, p, j.parallel),
        "auto: {why}",
        found=_HERE,
    ),
)
"""Why a pair cannot compute with the kernels that the recipe states."""
