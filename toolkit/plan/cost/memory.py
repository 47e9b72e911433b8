"""The symbols of a rank's memory, and which of its parts are there at the peak.

Every pipeline stage is a sum of model states, activations kept for their backward pass, logits
and loss, buffers, and the working memory of a layer (`terms.MEMORY`). The fullest stage counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from toolkit.layout import (
    Layout,
    LossKernel,
    loss_chunks,
    recomputed_layers,
    stage_layers,
)
from toolkit.optimizers.base import EXCHANGED_AT_ONCE, MOMENTS
from toolkit.plan.cost import terms
from toolkit.plan.cost.efficiency import DEFAULT
from toolkit.plan.cost.engine import FP32_BYTES, in_place_logit_bytes
from toolkit.plan.cost.layer import (
    context_split,
    layer_activations,
    of_micro_batch,
    stream_of,
    tokens_of,
)
from toolkit.plan.cost.stages import (
    StageShare,
    layers_of_stages,
    recomputed_of_stages,
)
from toolkit.plan.cost.workload import Workload
from toolkit.text.units import GIB

NVME_BUFFERS, NVME_SUB_GROUP, NVME_LIVE_PARAMETERS = 4, 1e8, 1e9
"""Values of `ds_configs/zero3_nvme.json`: buffer_count, sub_group_size, max_in_cpu."""
_MATRIX = (1024, 1024)
"""A usual weight, of which an optimizer's bytes per element are taken."""
MESSAGES = 2
"""Activations that a pipeline rank receives and sends while it computes."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank at the peak of a training step."""

    stage: int
    """Pipeline rank, from 0."""
    symbols: Mapping[str, float]
    """Symbols of `terms.MEMORY`, with the values of its rows."""

    def __getitem__(self, name: str) -> float:
        return self.symbols[name]

    @cached_property
    def parts(self) -> dict[str, float]:
        """Everything on the device. The parts add up to `total`."""
        return terms.MEMORY.parts(self.symbols)

    @property
    def model_states(self) -> float:
        """Weights, gradients and optimizer states."""
        return self["weights"] + self["gradients"] + self["optimizer"]

    @property
    def allocated(self) -> float:
        """The peak of torch.cuda.max_memory_allocated."""
        return self["allocated_bytes"]

    @property
    def reserved(self) -> float:
        """The peak of torch.cuda.max_memory_reserved."""
        return self.allocated + self["reserve"]

    @property
    def total(self) -> float:
        """Total memory of the device."""
        return self["total_bytes"]


def peak_memory(workload: Workload, layout: Layout, *, on_device: bool = True) -> Memory:
    """The fullest pipeline stage. A CPU has no memory outside of the allocator.

    Later stages hold fewer micro batches, so with equal layers only the first, the last and
    those with one layer more than it can be the fullest.
    """
    workload = workload.in_layout(layout)
    shares = _fullest_shares(workload, layout)
    stages = [_memory(workload, layout, share, on_device) for share in shares]
    return max(stages, key=lambda memory: memory.allocated)


def stage_memory(workload: Workload, layout: Layout, stage: int) -> Memory:
    """Memory of the ranks of one pipeline stage."""
    workload = workload.in_layout(layout)
    return _memory(workload, layout, workload.share(layout, stage), True)


def _memory(workload: Workload, layout: Layout, share: StageShare, on_device: bool) -> Memory:
    """The peak of one stage: at the loss, in a layer's backward pass, or after all of these."""
    micro_batch = micro_batch_symbols(workload, of_micro_batch(layout))
    symbols = {
        **micro_batch,
        **_state_symbols(workload, layout, share),
        **_activation_symbols(workload, layout, share, micro_batch),
        "reserve_share": DEFAULT["allocator.reserve"],
        "cuda_bytes": on_device * DEFAULT["device.cuda_bytes"],
        "communicators": on_device * workload.cost.communicators(layout),
        "communicator_bytes": DEFAULT["device.communicator_bytes"],
    }
    _choose_moment(workload, layout, share, terms.PRESENT.evaluate(symbols))
    return Memory(share.stage, terms.PEAK.evaluate(symbols))


def _choose_moment(
    workload: Workload, layout: Layout, share: StageShare, symbols: dict[str, float]
) -> None:
    """Set the buffers that are there at the peak. The parts that are not are 0."""
    cost, width = workload.cost, workload.width
    activations, workspace = symbols["activations"], symbols["workspace"]
    logits = symbols["logits"] if share.stage == layout.pp - 1 else 0.0
    padded = padded_share(workload, layout, share)
    engine, stacks = cost.buffers(layout, width, padded), stacked(workload, share)
    at_loss = cost.buffers_at_loss(layout, width, padded)
    at_end = cost.buffers_at_end(layout, width, padded)
    idle, loss, backward = 0.0, logits + at_loss, workspace + engine + stacks
    if at_end > activations + max(loss, backward):
        activations = logits = workspace = stacks = 0.0
        engine = at_end
    elif loss > backward:
        idle = max(0.0, engine + stacks - at_loss)
        workspace, stacks, engine = 0.0, 0.0, at_loss
    else:
        logits = 0.0
    # Owners exchange after these buffers are freed.
    owners = exchanged(workload, layout, share) - activations - logits - workspace
    symbols |= {"activations": activations, "logits": logits, "workspace": workspace}
    symbols |= {"engine_bytes": engine, "stacked_bytes": stacks, "idle_bytes": idle}
    symbols["owner_bytes"] = max(0.0, owners)


def _state_symbols(workload: Workload, layout: Layout, share: StageShare) -> dict[str, float]:
    """Model states of a rank that holds `share`. Gradients that are reduced go where the
    optimizer is."""
    each, cost, trained = state_bytes(workload, share), workload.cost, share.trained
    away, reduced = layout.offload_optimizer != "none", not cost.whole_gradients(layout)
    kept = layout.zero_stage == 2 and cost.keeps_gradients(workload.width)
    spread, whole = shards(workload, layout), (1.0, 1.0)
    weights = spread if layout.zero_stage >= cost.sharded_weights_from else whole
    gradients = spread if reduced else whole
    optimizer = spread if layout.zero_stage >= 1 else whole
    return {
        "weight_bytes": each.weight if layout.offload_parameters == "none" else 0.0,
        "gradient_bytes": 0.0 if away and reduced and not kept else each.gradient,
        "optimizer_bytes": 0.0 if away else each.optimizer,
        "saved_bytes": 0.0 if away else moments_saved(workload, layout, share),
        "dense": share.dense + share.vocabulary,
        "experts": share.experts,
        "trained_dense": trained.dense + trained.vocabulary,
        "trained_experts": trained.experts,
        "weight_ranks": weights[0],
        "weight_expert_ranks": weights[1],
        "gradient_ranks": gradients[0],
        "gradient_expert_ranks": gradients[1],
        "optimizer_ranks": optimizer[0],
        "optimizer_expert_ranks": optimizer[1],
    }


def _activation_symbols(
    workload: Workload, layout: Layout, share: StageShare, micro_batch: Mapping[str, float]
) -> dict[str, float]:
    """The layers of one chunk and what else it keeps of a micro batch."""
    recomputed = layers_stored(workload, layout, share)
    layers = share.layers / layout.vpp
    return {
        "waiting": chunks_waiting(layout, share),
        "recomputed": recomputed / layout.vpp,
        "whole": (share.layers - recomputed) / layout.vpp,
        "again_bytes": is_whole_again(workload, layout) * micro_batch["again_bytes"],
        "mask_bytes": document_masks(workload, layout, layers),
    }


def layers_stored(workload: Workload, layout: Layout, share: StageShare) -> float:
    """How many layers of a stage are recomputed. The others keep all activations."""
    division = layout.pp, layout.vpp, layout.stages
    recomputed = recomputed_of_stages(layout.recompute, workload.spec.layers, *division)
    return recomputed[share.stage]


def is_whole_again(workload: Workload, layout: Layout) -> bool:
    """Whether the peak includes the layer that is recomputed. If only the first layers of a
    chunk are recomputed, the memory of the last layers is free by then."""
    if isinstance(layout.recompute, str):
        return True
    return layout.recompute >= min(stage_layers(workload.spec.layers, *layout.division))


# Model states


def model_states_gib(workload: Workload, layout: Layout) -> float:
    """GiB of weights, gradients and optimizer states on the fullest rank.

    Offloaded states are not counted, although parts of them pass through the device.
    """
    shares = _fullest_shares(workload, layout)
    return max(_memory(workload, layout, one, True).model_states for one in shares) / GIB


def building_gib(workload: Workload, layout: Layout) -> float:
    """GiB of weights on the fullest rank while the model is built, if it is built whole."""
    if not workload.cost.builds_whole(workload.model, layout):
        return 0.0
    shares = _fullest_shares(workload, layout)
    return max(share.parameters for share in shares) * workload.width / GIB


class StateBytes(NamedTuple):
    """Bytes per parameter before ZeRO."""

    weight: float
    gradient: float
    optimizer: float


def state_bytes(workload: Workload, share: StageShare) -> StateBytes:
    """Bytes per parameter of AdamW under an engine, on average over the weights of `share`.

    fp32, and FSDP2's mixed precision, which ddp also uses: 4 + 4 + 8, but frozen weights are
    held in the precision that they are computed in. In 16 bits otherwise: a
    weight of 2, a gradient that is summed in fp32 (megatron-core's guide to the distributed
    optimizer: 18 bytes, 6 + 12/d sharded; DeepSpeed with our presets' `grad_accum_dtype`), and
    12 for the optimizer: fp32 weight and two moments (ZeRO, arXiv:1910.02054, figure 1).
    """
    if workload.precision == "fp32" or workload.cost.fp32_states:
        frozen = 1 - share.trained.parameters / share.parameters
        return StateBytes(4.0 - frozen * (4.0 - workload.width), 4.0, 8.0)
    return StateBytes(2.0, 4.0, 12.0)


def _shard(workload: Workload, layout: Layout, share: StageShare) -> float:
    """Parameters of a share whose states one rank holds if ZeRO shards them."""
    ranks, expert_ranks = shards(workload, layout)
    return (share.dense + share.vocabulary) / ranks + share.experts / expert_ranks


def shards(workload: Workload, layout: Layout) -> tuple[float, float]:
    """In how many parts ZeRO spreads the states of a layer, and those of an expert: over the
    ranks that hold it."""
    copies = layout.dp * layout.cp // layout.replicate
    if layout.ep > 1:
        return copies, max(1, copies * layout.tp // layout.ep)
    return copies, copies / _padding(workload, copies)


def moments_saved(workload: Workload, layout: Layout, share: StageShare) -> float:
    """Bytes of AdamW's states that another optimizer does not keep, which keeps states of whole
    tensors on one of the ranks that hold them."""
    whole, updated = workload.whole_tensors, _updated_whole(workload, share)
    if whole is None:
        return 0.0
    spread = _shard(workload, layout, updated)
    held = spread if layout.zero_stage else updated.parameters
    owned = updated.parameters if _replicated(layout) else spread / layout.replicate
    saved = FP32_BYTES * (len(MOMENTS) - len(whole.moments))
    return saved * held - whole.owner_bytes(_MATRIX) / prod(_MATRIX) * owned


def _updated_whole(workload: Workload, share: StageShare) -> StageShare:
    """What an optimizer other than AdamW updates: matrices of layers, with which norms and
    biases count, and of the vocabulary those that it takes."""
    whole, trained = workload.whole_tensors, share.trained
    if whole is None or whole.takes("embed_tokens.weight", 2):
        return trained
    head = not workload.spec.tied_embeddings and whole.takes("lm_head.weight", 2)
    return trained._replace(vocabulary=trained.output if head else 0.0)


def _replicated(layout: Layout) -> bool:
    """Whether every rank that holds a tensor holds all of it."""
    return layout.zero_stage == 0 and layout.tp == 1


def padded_share(workload: Workload, layout: Layout, share: StageShare) -> StageShare:
    """A share with experts as ranks gather them."""
    if not share.experts:
        return share
    copies = layout.dp * layout.cp // layout.replicate
    return share._replace(experts=share.experts * _padding(workload, copies))


def _padding(workload: Workload, ranks: int) -> float:
    """Ratio of a rank's shard of a layer's experts to its even share."""
    experts = workload.spec.experts
    if not (workload.cost.whole_experts and experts):
        return 1.0
    return -(-experts // ranks) * ranks / experts


def _fullest_shares(workload: Workload, layout: Layout) -> list[StageShare]:
    """Of the stages that can be the fullest: first, last, and the first with most layers. All
    where a layout divides layers by itself."""
    counts = layers_of_stages(workload.spec.layers, *layout.division)
    found = {0, counts.index(max(counts)), layout.pp - 1}
    stages = [*range(layout.pp)] if layout.stages else sorted(found)
    return [workload.share(layout, stage) for stage in stages]


# Buffers within a step


def chunks_waiting(layout: Layout, share: StageShare) -> int:
    """Forward passes of one model chunk whose backward pass has not run yet.

    1F1B: stage r of p holds p - r micro batches. Interleaved in v chunks, it begins with
    2·(p - r - 1) + (v - 1)·p forward passes of one chunk and then one more: on the first
    stage L·(1 + (p - 1)/(p·v)) layers of one micro batch (Korthikanti et al., section 4.2.3).
    """
    after = layout.pp - share.stage
    if layout.vpp > 1:
        after = 2 * (after - 1) + (layout.vpp - 1) * layout.pp + 1
    return min(after, layout.gradient_accumulation * layout.vpp)


def stacked(workload: Workload, share: StageShare) -> float:
    """Bytes of the stacked weights of one layer's experts, or then of their gradients, or of
    one expert's in the shape of all: those of the first linear layers, which are the larger
    ones."""
    spec = workload.spec
    if not workload.stacks_experts:
        return 0.0
    layers = share.layers * spec.moe_layers / spec.layers
    return workload.width * share.experts / layers * (2 / 3 if spec.gated_mlp else 0.5)


def document_masks(workload: Workload, layout: Layout, layers: float) -> float:
    """Bytes of the masks that isolate documents, of one micro batch in one chunk of layers.

    megatron-core's layers share one in the compute precision, and one more if some have a
    sliding window. transformers' share a boolean one, and attention keeps a copy in the compute
    precision for each layer that is not recomputed.
    """
    if not workload.document_mask:
        return 0.0
    one = layout.micro_batch * workload.sequence_length**2
    kinds = 2 if workload.spec.sliding_layers else 1
    width = workload.width
    if workload.model == "hf":
        copies = max(1, layers - recomputed_layers(layout.recompute, int(layers)))
        return (kinds + width * copies) * one
    return float(kinds * width * one)


def exchanged(workload: Workload, layout: Layout, share: StageShare) -> float:
    """Bytes that owners of whole tensors send and receive at once, each twice: the rectangles
    that a rank holds and the tensors that it owns, at most all of its stage's."""
    spec, whole, updated = (
        workload.spec,
        workload.whole_tensors,
        _updated_whole(workload, share),
    )
    if whole is None:
        return 0.0
    width, all_of_them = whole.sent_bytes, 2 * updated.parameters
    if not whole.by_replicas:
        return 2 * width * min(EXCHANGED_AT_ONCE, all_of_them)
    matrix = spec.hidden * max(spec.intermediate, spec.expert_intermediate, spec.hidden)
    own = 2 * max(matrix, spec.vocab * spec.hidden * (updated.vocabulary > 0))
    if _replicated(layout):
        return width * own
    return 2 * width * min(max(EXCHANGED_AT_ONCE, own), own + all_of_them)


@lru_cache(maxsize=4096)
def micro_batch_symbols(workload: Workload, layout: Layout) -> Mapping[str, float]:
    """Symbols that one micro batch has on every stage. See `of_micro_batch`."""
    spec, width, tp = workload.spec, workload.width, layout.tp
    layer = layer_activations(workload, layout)
    tokens = tokens_of(workload, layout)
    whole = width * tokens * spec.hidden
    stream = width * stream_of(workload, layout) * spec.hidden
    messages = whole if layout.sequence_parallel and tp > 1 else 0.0  # the gathered sequence
    if layout.pp > 1:
        messages += MESSAGES * stream
    if layout.cp > 1:
        messages += width * context_split(workload, layout).buffers
    rows = workload.logit_rows(tp)
    logit_bytes, chunks, per_weight = _logits(workload, layout.loss, int(tokens), tp)
    return {
        **{f"{part}_bytes": size for part, size in layer.stored.items()},
        "whole_layer_bytes": layer.whole,
        "again_bytes": layer.again,
        "layer_gradient_bytes": layer.gradients,
        "stream_bytes": stream,
        "message_bytes": messages,
        "tokens": tokens,
        "vocabulary": rows,
        "logit_bytes": logit_bytes,
        "loss_chunks": chunks,
        "head_gradient_bytes": per_weight * rows * spec.hidden,
    }


def _logits(workload: Workload, loss: LossKernel, tokens: int, tp: int) -> tuple[int, int, int]:
    """Bytes per logit, number of chunks, and bytes per element of the head for the sum of its
    gradient over the chunks.

    Liger's kernel (`fused_linear_cross_entropy.py`) takes as many tokens at a time as have no
    more logits than the micro batch has hidden values, up to a power of two. Logits become
    their gradient, once more times that of each token.
    """
    spec, width = workload.spec, workload.width
    if loss == "liger":
        at_once = -(-tokens // -(-spec.vocab // spec.hidden))
        chunks = -(-tokens // min(tokens, 1 << (at_once - 1).bit_length()))
        return 2 * width, chunks, width
    chunks = loss_chunks(loss, tokens, spec.vocab, tp)
    return _bytes_per_logit(workload, tp), chunks, width if chunks > 1 else 0


def _bytes_per_logit(workload: Workload, tp: int) -> int:
    """Bytes of logits and loss at their peak, per logit.

    A fused kernel holds logits and gradients. Otherwise the model or the engine decides.
    """
    width = workload.width
    if workload.fused_loss:
        return 2 * width
    capped = width if workload.spec.capped_logits else 0  # tanh keeps its result
    if workload.megatron_layers:
        return in_place_logit_bytes(width) + capped
    return workload.cost.logit_bytes(width, tp) + capped


# Offload


def offloaded_bytes(
    workload: Workload, layout: Layout, gpus_per_node: int
) -> tuple[float, float]:
    """Host memory and disk space of one node for states that are offloaded, each rank its ZeRO
    partition of the first stage.

    ZeRO-Offload (arXiv:2101.06840, section 4.1) updates on the CPU: it holds the optimizer
    states and fp32 gradients, and pinned copies of the 16-bit weights it sends back. FSDP
    sends the fp32 weights themselves. With NVMe (ZeRO-Infinity, arXiv:2104.07857) gradients
    stay in memory, too, and buffers of `ds_configs` remain.
    """
    share = workload.share(layout, 0)
    each = state_bytes(workload, share)
    ranks = layout.dp * layout.cp if layout.zero_stage else 1
    held, trained = share.parameters / ranks, share.trained.parameters / ranks
    copies = 0 if workload.cost.sends_fp32_weights else workload.width
    buffers = NVME_BUFFERS * each.optimizer * min(NVME_SUB_GROUP, trained)
    host = {
        "none": 0.0,
        "cpu": (each.optimizer + each.gradient + copies) * trained,
        "nvme": each.gradient * trained + buffers,
    }[layout.offload_optimizer]
    on_disk = layout.offload_optimizer == "nvme"
    disk = (each.optimizer + each.gradient) * trained if on_disk else 0.0
    if layout.offload_parameters == "nvme":
        host += each.weight * min(NVME_LIVE_PARAMETERS, held)
        disk += each.weight * held
    elif layout.offload_parameters == "cpu":
        host += each.weight * held
    on_node = min(gpus_per_node, layout.world)
    return host * on_node, disk * on_node
