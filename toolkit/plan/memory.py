"""Memory of one rank, by part: what fits is decided here.

Every pipeline stage is a sum of model states (weights, gradients, optimizer), activations
that wait for their backward pass, the logits and the loss, buffers of communication, and the
working memory of the layer that is computed. The fullest stage counts.
"""

from dataclasses import dataclass
from functools import lru_cache

from toolkit.plan.activations import (
    FP32_BYTES,
    Activations,
    compute_bytes,
    layer_activations,
)
from toolkit.plan.layout import Layout, padded_vocab, stage_layers
from toolkit.plan.workload import Workload

GIB = 2**30

RESERVE_SHARE = 0.07
"""Memory that PyTorch's allocator holds beyond what is allocated at the peak, as a share of
it: blocks are split, rounded up and not always reused. Calibrated on torchtitan's reserved
peaks with torch.compile (Llama 3 8B on 8 and 128 H100)."""
CONTEXT_BYTES = 1.0 * GIB
"""Outside PyTorch's allocator: the CUDA context with its kernels (about 0.5 GiB) and NCCL's
channel buffers (10 MiB per channel and communicator)."""
DEEPSPEED_BUCKET = 1e8
"""Elements of the reduce and all-gather buckets of `ds_configs`."""
DEEPSPEED_LIVE_PARAMETERS = 1e9
"""Gathered elements that ZeRO-3 keeps at once (stage3_max_live_parameters)."""
NVME_BUFFERS, NVME_SUB_GROUP, NVME_LIVE_PARAMETERS = 4, 1e8, 1e9
"""Of `ds_configs/zero3_nvme.json`: buffer_count, sub_group_size, max_in_cpu."""
FSDP_GATHERED_LAYERS = 2
"""Layers whose weights FSDP holds gathered: the one in use and the one that is prefetched."""
MICRO_STEP_COPIES = 2
"""Activations that a pipeline rank receives and sends while it computes."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a training step, by part."""

    stage: int
    """Pipeline rank, from 0."""
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    """Of the micro batches that wait for their backward pass."""
    logits: float
    """Logits, their fp32 copies and gradients; 0 where a layer's backward needs more."""
    workspace: float
    """Recomputed activations and gradients of one layer; 0 where the logits need more."""
    buffers: float
    """Communication: buckets, gathered weights, pipeline messages."""
    context: float = CONTEXT_BYTES
    """What CUDA and NCCL hold outside the allocator."""

    @property
    def model_states(self) -> float:
        """Weights, gradients and optimizer states."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def allocated(self) -> float:
        """The peak of torch.cuda.max_memory_allocated."""
        return (
            self.model_states + self.activations + self.logits + self.workspace + self.buffers
        )

    @property
    def reserve(self) -> float:
        """What the allocator holds beyond that."""
        return RESERVE_SHARE * self.allocated

    @property
    def reserved(self) -> float:
        """The peak of torch.cuda.max_memory_reserved."""
        return self.allocated + self.reserve

    @property
    def total(self) -> float:
        """All that the device needs."""
        return self.reserved + self.context

    def fits(self, capacity_gib: float | None) -> bool:
        """Whether a device of this memory (None: no limit) holds it."""
        return capacity_gib is None or self.total <= capacity_gib * GIB


@dataclass(frozen=True)
class Share:
    """Parameters of one rank before ZeRO."""

    dense: float
    """All but the experts'."""
    experts: float
    head: float
    """Those of `dense` that embed tokens or make logits."""
    layers: int


def peak_memory(workload: Workload, layout: Layout) -> Memory:
    """The fullest pipeline stage.

    Later stages hold fewer micro batches, so with equal layers only the first, the last and
    those with one layer more than it can be the fullest.
    """
    return max(
        (stage_memory(workload, layout, stage) for stage in _candidates(workload, layout)),
        key=lambda memory: memory.allocated,
    )


def _candidates(workload: Workload, layout: Layout) -> tuple[int, ...]:
    """Stages that can be the fullest: first, last, and the first of those with most layers."""
    counts = _layers_of_stages(workload.spec.layers, layout.pp, layout.vpp)
    return tuple({0, counts.index(max(counts)), layout.pp - 1})


@lru_cache(maxsize=1024)
def _layers_of_stages(layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    chunks = stage_layers(layers, pp, vpp)
    return tuple(sum(chunks[stage::pp]) for stage in range(pp))


def stage_memory(workload: Workload, layout: Layout, stage: int) -> Memory:
    """Memory of the ranks of one pipeline stage."""
    share = _share(workload, *_degrees(layout), stage)
    layer = layer_activations(workload, layout)
    parameters, gradients, optimizer = _states(workload, layout, share)
    logits = _head(workload, layout) if stage == layout.pp - 1 else 0.0
    working = layer.workspace
    return Memory(
        stage=stage,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=_waiting(layout, layer, share, stage),
        logits=logits if logits > working else 0.0,
        workspace=0.0 if logits > working else working,
        buffers=_buffers(workload, layout, share),
    )


# Model states


def model_states_gib(workload: Workload, layout: Layout) -> float:
    """GiB of weights, gradients and optimizer states on the fullest rank.

    What is offloaded counts as away, although parts of it pass through the device.
    """
    stages = _candidates(workload, layout)
    shares = (_share(workload, *_degrees(layout), stage) for stage in stages)
    return max(sum(_states(workload, layout, share)) for share in shares) / GIB


def _degrees(layout: Layout) -> tuple[int, int, int, int]:
    """What a rank's share of the parameters depends on."""
    return layout.tp, layout.ep, layout.pp, layout.vpp


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter before ZeRO."""

    weight: float
    gradient: float
    optimizer: float


def state_bytes(workload: Workload) -> StateBytes:
    """Bytes per parameter of AdamW under an engine.

    fp32, and autocast over fp32 weights (ddp, FSDP2's mixed precision): 4 + 4 + 8. In 16
    bits: a weight of 2, a gradient that is summed in fp32 (megatron-core's guide to the
    distributed optimizer: 18 bytes, 6 + 12/d sharded; DeepSpeed with our presets'
    `grad_accum_dtype`), and 12 for the optimizer: fp32 weight and two moments (ZeRO,
    arXiv:1910.02054, figure 1).
    """
    if workload.precision == "fp32" or workload.engine in ("ddp", "fsdp"):
        return StateBytes(4.0, 4.0, 8.0)
    return StateBytes(2.0, 4.0, 12.0)


def _states(workload: Workload, layout: Layout, share: Share) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimizer states on a rank that holds `share`."""
    copies = layout.dp * layout.cp
    # An expert's states are spread over the ranks that hold this expert.
    expert_copies = max(1, copies * layout.tp // layout.ep) if layout.ep > 1 else copies

    def held(per_parameter: float, stage: int) -> float:
        if layout.zero_stage < stage:
            return per_parameter * (share.dense + share.experts)
        return per_parameter * (share.dense / copies + share.experts / expert_copies)

    each = state_bytes(workload)
    away = layout.offload_optimizer != "none"
    return (
        0.0 if layout.offload_parameters != "none" else held(each.weight, 3),
        # From stage 2 on, reduced gradients go where the optimizer is.
        0.0 if away and layout.zero_stage >= 2 else held(each.gradient, 2),
        0.0 if away else held(each.optimizer, 1),
    )


@lru_cache(maxsize=4096)
def _share(workload: Workload, tp: int, ep: int, pp: int, vpp: int, stage: int) -> Share:
    """Parameters on a rank of a pipeline stage before ZeRO.

    Norms, routers and learned positions are whole on every tensor-parallel rank; one expert
    is whole on its rank with expert parallel, else split like a dense MLP.
    """
    spec, parts = workload.spec, workload.spec.parameters
    layers = _layers_of_stages(spec.layers, pp, vpp)[stage]
    split = (parts.attention + parts.mlp) / tp + parts.norms + parts.router
    experts = parts.experts / (ep if ep > 1 else tp)
    vocabulary = padded_vocab(spec.vocab, tp) * spec.hidden / tp
    head = 0.0
    if stage == 0:
        head += vocabulary + parts.position_embedding
    if stage == pp - 1 and not (spec.tied_embeddings and pp == 1):
        head += vocabulary
    part = layers / spec.layers
    return Share(part * split + head, part * experts, head, layers)


# What comes and goes within a step


def _waiting(layout: Layout, layer: Activations, share: Share, stage: int) -> float:
    """Activations of the micro batches whose backward pass is still to come.

    1F1B: stage r of p holds p - r micro batches. Interleaved in v chunks, it begins with
    2·(p - r - 1) + (v - 1)·p forward passes of one chunk and then one more: on the first
    stage L·(1 + (p - 1)/(p·v)) layers of one micro batch (Korthikanti et al., section 4.2.3).
    """
    after = layout.pp - stage
    held = after
    if layout.vpp > 1:
        held = 2 * (after - 1) + (layout.vpp - 1) * layout.pp + 1
    chunks = min(held, layout.gradient_accumulation * layout.vpp)
    return layer.stored.total * share.layers / layout.vpp * chunks


def _head(workload: Workload, layout: Layout) -> float:
    """The final norm, the logits and the loss of one micro batch on the last stage.

    Per logit: megatron-core casts to fp32 and turns that copy into the softmax and then the
    gradient in place, beside a 16-bit tensor; PyTorch's cross entropy keeps the fp32 log
    softmax and makes its gradient and the logits' beside it; a fused kernel holds logits and
    gradients.
    """
    spec, width = workload.spec, compute_bytes(workload)
    tokens = layout.micro_batch * workload.sequence_length / layout.cp
    stream = tokens * spec.hidden / (layout.tp if layout.sequence_parallel else 1)
    logits = tokens * padded_vocab(spec.vocab, layout.tp) / layout.tp
    if workload.fused_loss:
        per_logit = 2 * width
    elif workload.engine == "megatron":
        per_logit = FP32_BYTES + (width if width < FP32_BYTES else 0)
    else:
        per_logit = 3 * FP32_BYTES
    return 2 * width * stream + per_logit * logits


def _buffers(workload: Workload, layout: Layout, share: Share) -> float:
    """Communication: messages of tensor and pipeline parallel, and the engine's buckets."""
    spec, width = workload.spec, compute_bytes(workload)
    whole = layout.micro_batch * workload.sequence_length / layout.cp * spec.hidden
    needed = 0.0
    if layout.sequence_parallel and layout.tp > 1:
        needed += width * whole  # the gathered sequence
    if layout.pp > 1:
        split = layout.tp if layout.sequence_parallel else 1
        needed += MICRO_STEP_COPIES * width * whole / split
    if layout.cp > 1:  # keys and values of the next ranks while those of this are used
        needed += 4 * width * whole / spec.hidden * spec.kv_heads * spec.head_dim / layout.tp
    held = share.dense + share.experts
    if workload.engine == "deepspeed":
        return needed + _deepspeed_buckets(layout, width, held)
    if workload.engine == "fsdp":
        return needed + _fsdp_window(layout, width, share)
    if workload.engine == "ddp" and layout.dp > 1:
        return needed + FP32_BYTES * held  # buckets that gradients are copied to
    return needed


def _deepspeed_buckets(layout: Layout, width: int, held: float) -> float:
    """Reduce buckets (two where communication overlaps) and gathered weights."""
    bucket = width * min(DEEPSPEED_BUCKET, held)
    if layout.zero_stage == 0 or layout.dp == 1:
        return 0.0
    if layout.zero_stage == 3:
        return 2 * bucket + width * min(DEEPSPEED_LIVE_PARAMETERS, held)
    return (2 if layout.zero_stage == 1 else 3) * bucket


def _fsdp_window(layout: Layout, width: int, share: Share) -> float:
    """Weights that FSDP gathers, and gradients before they are scattered.

    Embedding and head stay gathered from the forward to the backward pass, and the head's
    gradient until the embedding's is there; layers come and go. A layer's gradients are
    there twice: in compute precision and, copied, in the fp32 of the reduce-scatter.
    """
    if layout.zero_stage < 2 or layout.dp * layout.cp == 1:
        return 0.0
    layer = (share.dense - share.head + share.experts) / share.layers
    gathered = share.head + FSDP_GATHERED_LAYERS * layer
    if layout.zero_stage == 2:
        gathered = share.dense + share.experts
    return width * (gathered + share.head / 2) + (width + FP32_BYTES) * layer


# What leaves the device


def host_bytes(workload: Workload, layout: Layout, gpus_per_node: int) -> float:
    """Host memory of one node for what is offloaded to the CPU, or passes through it.

    ZeRO-Offload (arXiv:2101.06840, section 4.1) updates on the CPU: it holds the optimizer
    states and fp32 gradients, and pinned copies of the 16-bit weights it sends back. With
    NVMe (ZeRO-Infinity, arXiv:2104.07857) buffers of `ds_configs` remain.
    """
    ranks = min(gpus_per_node, layout.world)
    each, width = state_bytes(workload), compute_bytes(workload)
    share = _offloaded_parameters(workload, layout)
    held = 0.0
    if layout.offload_optimizer == "cpu":
        held += (each.optimizer + each.gradient + width) * share
    elif layout.offload_optimizer == "nvme":
        # Gradients stay in memory; four buffers of one sub-group pass by.
        held += each.gradient * share
        held += NVME_BUFFERS * each.optimizer * min(NVME_SUB_GROUP, share)
    if layout.offload_parameters == "cpu":
        held += each.weight * share
    elif layout.offload_parameters == "nvme":
        held += each.weight * min(NVME_LIVE_PARAMETERS, share)
    return held * ranks


def nvme_bytes(workload: Workload, layout: Layout, gpus_per_node: int) -> float:
    """Disk of one node for what is offloaded to NVMe."""
    ranks = min(gpus_per_node, layout.world)
    each, share = state_bytes(workload), _offloaded_parameters(workload, layout)
    held = 0.0
    if layout.offload_optimizer == "nvme":
        held += (each.optimizer + each.gradient) * share
    if layout.offload_parameters == "nvme":
        held += each.weight * share
    return held * ranks


def _offloaded_parameters(workload: Workload, layout: Layout) -> float:
    """Parameters whose states one rank keeps away: its ZeRO partition of the first stage."""
    share = _share(workload, *_degrees(layout), 0)
    return (share.dense + share.experts) / (layout.dp if layout.zero_stage else 1)
