"""The workload: everything that memory and time depend on except the layout and the cluster."""

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

from toolkit.backend import BACKENDS
from toolkit.layout import (
    CostPrecision,
    EngineName,
    FusedKernels,
    Layout,
    ModelName,
    Pair,
    padded_vocab,
)
from toolkit.models.spec import ModelSpec
from toolkit.optimizers.base import WholeTensors
from toolkit.plan.cost.efficiency import DEFAULT, Efficiency
from toolkit.plan.cost.engine import FP32_BYTES, EngineCost
from toolkit.plan.cost.stages import StageShare, stage_share
from toolkit.plan.hardware.cluster import Cluster
from toolkit.plan.request import PlanRequest
from toolkit.plan.rules import attention

Attention = Literal["fused", "unfused", "eager"]


@dataclass(frozen=True)
class Workload:
    """A model under an engine, independent of the layout."""

    spec: ModelSpec
    sequence_length: int
    precision: CostPrecision
    engine: EngineName
    rows_per_sample: int = 1
    """Sequences of a sample, which is what batch sizes count: 2 where it is a pair."""
    model: ModelName = "hf"
    """The model implementation: transformers' (or another one on PyTorch's own operators), or
    megatron-core's."""
    attention: Attention = "fused"
    """`fused`: flash attention, which stores no scores. `unfused`: scores written to memory,
    one kernel from them to the weights (Megatron's of 2022). `eager`: by single PyTorch
    operators."""
    flash_version: Literal[1, 2] = 2
    """Generation of the fused kernel: 1 for FlashAttention (and its Triton port), 2 for
    FlashAttention-2 and those that came after it."""
    fused_elementwise: bool = True
    """Chains of elementwise operators run as one kernel (Megatron's or Transformer Engine's
    fusions, torch.compile). Otherwise each reads and writes memory."""
    fused_glu: bool = False
    """Whether a gated activation is one kernel, which keeps only its input, where other
    elementwise operators are single ones."""
    fused_norms: bool = False
    """Whether an RMSNorm is one kernel, which keeps only its input, and so are rotary
    positions, where other elementwise operators are single ones."""
    grouped_experts: bool = False
    """Products of all experts at once."""
    reduce_bytes: float | None = None
    """Bytes per gradient element on the wire. None: 4, every engine's own choice."""
    reduce_overlap: bool = True
    """Gradients are reduced, and sharded parameters gathered, while others are computed."""
    dropout: bool = False
    """Dropout over attention scores and both branches of a layer, whose masks are stored."""
    document_mask: bool = False
    """A mask isolates the documents of a sequence. torch then uses its memory-efficient kernel,
    which also computes the masked scores."""
    cudnn: bool = False
    """Attention uses cuDNN's kernel, as in Transformer Engine."""
    whole_tensors: WholeTensors | None = None
    """How an optimizer other than AdamW updates matrices."""
    fused_loss: bool = False
    """Softmax and cross entropy in one kernel that works in the logits' own precision
    (flash-attn's), instead of on fp32 copies."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a search looks a workload up thousands of times."""
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    @cached_property
    def sample_tokens(self) -> int:
        """Tokens of a sample."""
        return self.rows_per_sample * self.sequence_length

    @cached_property
    def width(self) -> int:
        """Bytes of an activation element. fp8 layers pass bf16 to each other."""
        return FP32_BYTES if self.precision == "fp32" else 2

    @cached_property
    def pair(self) -> Pair:
        """Engine and model implementation."""
        return Pair(self.engine, self.model)

    @property
    def megatron_layers(self) -> bool:
        """Whether its modules are megatron-core's."""
        return self.model == "megatron"

    @property
    def adds_to_experts(self) -> bool:
        """Whether adapters are added to the weights of experts in each pass, as PEFT does to
        transformers' models, and get their gradients from those of whole weights."""
        adapters = self.spec.adapters
        return self.model == "hf" and adapters is not None and adapters.experts > 0

    @property
    def stacks_experts(self) -> bool:
        """Whether a pass makes stacks of the experts' weights or gradients: grouped products
        of megatron-core's, and experts of transformers in turn."""
        spec = self.spec
        if not spec.moe_layers or (spec.every_expert and self.model == "hf"):
            return False
        return self.grouped_experts == self.megatron_layers

    @cached_property
    def cost(self) -> EngineCost:
        """The engine-specific costs."""
        return BACKENDS[self.engine].cost

    def logit_rows(self, tp: int) -> float:
        """Rows of the head on a tensor-parallel rank, padded: logits of one token."""
        return padded_vocab(self.spec.vocab, tp) / tp

    def share(self, layout: Layout, stage: int) -> StageShare:
        """The parameters that a rank of pipeline rank `stage` holds."""
        return _share(self, layout.tp, layout.ep, layout.pp, layout.vpp, stage, layout.stages)

    def in_layout(self, layout: Layout) -> "Workload":
        """This workload, with the operators that the layout decides."""
        compiled, grouped = layout.compile != "none", layout.experts == "grouped"
        return _in_layout(self, compiled, layout.fused, grouped, layout.cp > 1)


class Setup(NamedTuple):
    """What is trained, how it is laid out, and on what."""

    workload: Workload
    layout: Layout
    cluster: Cluster
    efficiency: Efficiency = DEFAULT


@lru_cache(maxsize=1 << 14)
def _share(workload: Workload, *place: Any) -> StageShare:
    """Kept by the workload, whose hash is: that of a model's shape takes longer."""
    return stage_share(workload.spec, *place)


@lru_cache(64)
def _in_layout(
    workload: Workload, compiled: bool, fused: FusedKernels, grouped: bool, spread: bool
) -> Workload:
    """Compiled layers are fused ones. Liger's activation function is not in experts. With
    context parallel, attention has the kernel for documents of different lengths."""
    liger = fused == "liger"
    glu = (compiled or fused != "none") and not (liger and workload.spec.moe_layers)
    return replace(
        workload,
        fused_elementwise=workload.fused_elementwise or compiled,
        fused_glu=workload.fused_glu or glu,
        fused_norms=workload.fused_norms or liger,
        grouped_experts=workload.grouped_experts or grouped,
        document_mask=workload.document_mask and not spread,
        cudnn=workload.cudnn and not spread,
    )


def workload_of(job: PlanRequest, pair: Pair) -> Workload:
    """What a recipe trains on an engine and a model implementation: its operators are single
    ones, where no layout compiles them."""
    kernel, spec = attention.kernel(job), job.spec
    if spec.every_expert and pair.model == "hf":
        spec = replace(spec, experts_per_token=spec.experts)
    return Workload(
        spec,
        job.training.sequence_length,
        job.training.precision if job.kernels.fp8 is None else "fp8",
        pair.engine,
        rows_per_sample=job.training.rows_per_sample,
        model=pair.model,
        fused_elementwise=False,
        # Without a mask a row counts as one document: how long documents are is not known.
        document_mask=job.isolates and kernel != "varlen",
        whole_tensors=job.optimizer.kind.whole,
        attention="eager" if attention.whole_scores(job) else "fused",
        cudnn=kernel == "cudnn",
    )
