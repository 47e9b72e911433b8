"""How each part of a rank's memory is computed (`memory.py`)."""

from inspect import cleandoc

from toolkit.layout import Layout
from toolkit.plan.cost.derivation import Derivation, Symbol, total
from toolkit.plan.cost.layer import layer_activations
from toolkit.plan.cost.memory import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    RESERVE_SHARE,
    Memory,
    chunks_waiting,
    degrees,
    document_masks,
    exchanged,
    is_whole_again,
    layers_stored,
    logits_at_once,
    micro_batch_memory,
    micro_batch_of,
    moments_saved,
    padded_share,
    shards,
    stacked,
    state_bytes,
)
from toolkit.plan.cost.stages import StageShare
from toolkit.plan.cost.workload import Workload

_STATES = "ZeRO, arXiv:1910.02054, figure 1"
_SAVED = "what autograd keeps (Korthikanti et al., arXiv:2205.05198, equations 1 to 6)"
_SCHEDULE = "1F1B: Narayanan et al., arXiv:2104.04473, section 2.2"


def memory_derivations(
    workload: Workload, layout: Layout, memory: Memory
) -> dict[str, Derivation]:
    """By the names of `memory_parts`, for the rank that `memory` describes."""
    workload = workload.in_layout(layout)
    share = workload.share(*degrees(layout), memory.stage)
    return {
        **_states(workload, layout, share, memory),
        "activations": _activations(workload, layout, share, memory),
        "logits and loss": _logits(workload, layout, memory),
        "one layer's backward": _workspace(workload, layout, memory),
        "buffers": _buffers(workload, layout, share, memory),
        "allocator reserve": Derivation(
            memory.reserve,
            "idle_bytes + reserve * (allocated_bytes + idle_bytes)",
            {
                "reserve": RESERVE_SHARE,
                "allocated_bytes": memory.allocated,
                "idle_bytes": memory.idle,
            },
            "calibrated: torchtitan's reserved peaks with torch.compile",
        ),
        "CUDA and NCCL": Derivation(
            memory.context,
            "cuda_bytes + communicators * communicator_bytes",
            {
                "cuda_bytes": CONTEXT_BYTES,
                "communicators": workload.cost.communicators(layout),
                "communicator_bytes": COMMUNICATOR_BYTES,
            },
            "assumptions: not measured yet",
        ),
    }


def _states(
    workload: Workload, layout: Layout, share: StageShare, memory: Memory
) -> dict[str, Derivation]:
    each, cost, zero = state_bytes(workload), workload.cost, layout.zero_stage
    ranks, expert_ranks = shards(workload, layout)

    def held(value: float, name: str, per: float, spread: bool, saved: float = 0) -> Derivation:
        what = share if name == "weight" else share.trained
        counted = "parameters" if name == "weight" else "trained"
        symbols: dict[str, Symbol] = {f"{name}_bytes": per, counted: what.parameters}
        formula = f"{name}_bytes * {counted}"
        if spread and what.experts and ranks != expert_ranks:
            formula = f"{name}_bytes * (dense / ranks + experts / expert_ranks)"
            del symbols[counted]
            symbols |= {"dense": what.dense + what.vocabulary, "ranks": ranks}
            symbols |= {"experts": what.experts, "expert_ranks": expert_ranks}
        elif spread:
            formula, symbols["ranks"] = f"{formula} / ranks", ranks
        if saved:
            formula, symbols["saved_bytes"] = f"{formula} - saved_bytes", saved
        return Derivation(value, formula, symbols, _STATES)

    sharded, reduced = zero >= cost.sharded_weights_from, not cost.whole_gradients(layout)
    saved = moments_saved(workload, layout, share)
    return {
        "weights": held(memory.parameters, "weight", each.weight, sharded),
        "gradients": held(memory.gradients, "gradient", each.gradient, reduced),
        "optimizer": held(memory.optimizer, "optimizer", each.optimizer, zero >= 1, saved),
    }


def _activations(
    workload: Workload, layout: Layout, share: StageShare, memory: Memory
) -> Derivation:
    """All micro batches that wait, in all chunks of layers of the rank."""
    layers = share.layers / layout.vpp
    recomputed = layers_stored(workload, layout, share) / layout.vpp
    tokens = layout.micro_batch * workload.sample_tokens / layout.cp
    way = micro_batch_of(layout)[5]
    stored = layer_activations(workload, *_shape(layout), way, layout.exchange).stored
    per_token = {
        f"{part}_bytes": size / tokens for part, size in stored._asdict().items() if size
    }
    step = micro_batch_memory(workload, *micro_batch_of(layout))
    source = "the layer's input, which recompute starts from" if way == "full" else _SAVED
    formula = f"tokens * ({' + '.join(per_token)})"
    layer = Derivation(stored.total, formula, {"tokens": tokens, **per_token}, source)
    symbols: dict[str, Symbol] = {
        "waiting": chunks_waiting(layout, share), "layers": layers, "layer_bytes": layer,
    }  # fmt: skip
    terms = ["layers * layer_bytes"]
    if recomputed < layers:
        terms = ["recomputed * layer_bytes", "(layers - recomputed) * whole_bytes"]
        symbols |= {"recomputed": recomputed, "whole_bytes": step.whole}
    for name, one in {
        "mask_bytes": document_masks(workload, layout, layers),
        "sent_bytes": step.sent if layout.vpp > 1 else 0.0,
    }.items():
        if one:
            terms.append(name)
            symbols[name] = one
    formula = terms[0] if len(terms) == 1 else f"({' + '.join(terms)})"
    schedule = _SCHEDULE if layout.pp > 1 else ""
    return Derivation(memory.activations, f"waiting * {formula}", symbols, schedule)


def _shape(layout: Layout) -> tuple[int, int, bool, int]:
    return layout.tp, layout.cp, layout.sequence_parallel, layout.micro_batch


def _logits(workload: Workload, layout: Layout, memory: Memory) -> Derivation:
    spec, width, tp = workload.spec, workload.width, layout.tp
    tokens = layout.micro_batch * workload.sample_tokens / layout.cp
    rows = workload.logit_rows(tp)
    logits = logits_at_once(workload, layout.loss, int(tokens), tp)
    stream = width * tokens * spec.hidden / (tp if layout.sequence_parallel else 1)
    formula = "2 * stream_bytes + logit_bytes * tokens * vocabulary / chunks"
    symbols: dict[str, Symbol] = {
        "stream_bytes": stream,
        "logit_bytes": logits.each,
        "tokens": tokens,
        "vocabulary": rows,
        "chunks": logits.chunks,
    }
    if logits.per_weight:
        weights = workload.logit_rows(tp) * spec.hidden
        formula = f"{formula} + gradient_bytes"
        symbols["gradient_bytes"] = logits.per_weight * weights
    return Derivation(memory.logits, formula, symbols, "how the loss is computed: counted")


def _workspace(workload: Workload, layout: Layout, memory: Memory) -> Derivation:
    way = micro_batch_of(layout)[5]
    layer = layer_activations(workload, *_shape(layout), way, layout.exchange)
    again = is_whole_again(workload, layout) * layer.again
    parts = {"recomputed_bytes": again, "gradient_bytes": layer.gradients}
    source = "gradients in one layer's backward pass, next to what it recomputed"
    return total(memory.workspace, parts, source)


def _buffers(
    workload: Workload, layout: Layout, share: StageShare, memory: Memory
) -> Derivation:
    """What the engine's buffers are is what its own cost says of them."""
    cost, width = workload.cost, workload.width
    padded = padded_share(workload, layout, share)
    held, experts = cost.buffers_at_end, 0.0
    if memory.workspace:
        held, experts = cost.buffers, stacked(workload, share)
    elif memory.logits:
        held = cost.buffers_at_loss
    engine, why = held(layout, width, padded), held.__doc__
    freed = memory.activations + memory.logits + memory.workspace
    owners = max(0.0, exchanged(workload, layout, share) - freed)
    step = micro_batch_memory(workload, *micro_batch_of(layout))
    parts: dict[str, Symbol] = {
        "message_bytes": step.messages,
        "engine_bytes": engine,
        "stacked_bytes": experts,
        "owner_bytes": owners,
    }
    about = " ".join(cleandoc(why or "").split()) if engine else ""
    messages = "what tensor and context groups and pipeline stages receive and send"
    return total(memory.buffers, parts, f"{workload.engine}: {about}" if about else messages)
