"""How each part of a step's time is computed (`time.py`)."""

from collections.abc import Mapping

from toolkit.plan.cost.collectives import Collectives
from toolkit.plan.cost.derivation import Derivation, Symbol, amount, total
from toolkit.plan.cost.efficiency import TABLE
from toolkit.plan.cost.exchange import GATHERED, SENT
from toolkit.plan.cost.operators import (
    BACKWARD_SCORES,
    Pass,
    attention_kernel,
    fused_attention,
    layer_flops,
)
from toolkit.plan.cost.time import BusiestStage, StepTime
from toolkit.plan.cost.traffic import (
    Overlapped,
    layer_collectives,
    messages_waited,
    pipeline_message_s,
)
from toolkit.plan.cost.update import UPDATE_BYTES, offload_parts_s, updated_parameters

_RING = "Thakur et al. 2005: a ring moves (n - 1)/n of the data; rates: NCCL tests"
_SENT_TO_ALL = "an equal part to each member: the slower of both links; rates: NCCL tests"
_NOT_HIDDEN = "what computation does not hide, or by how much it slows computation down"
_BUBBLE = "Narayanan et al., arXiv:2104.04473, section 2.2"
_TENSOR = "two collectives per pass: Korthikanti et al., arXiv:2205.05198, section 4.2.2"


def time_derivations(busiest: BusiestStage, time: StepTime) -> dict[str, Derivation]:
    """By the names of `time_parts`, for the stage that the others wait for."""
    return {
        **_layers(busiest, time.compute),
        "logits": _head(busiest, time.compute["logits"]),
        **_waiting(busiest, time.communication),
        "pipeline bubble": Derivation(
            time.bubble_s,
            "other_stages_s / chunks",
            {"other_stages_s": busiest.others_s, "chunks": busiest.place.layout.vpp},
            f"one micro batch on each other stage: {_BUBBLE}",
        ),
        "optimizer": _optimizer(busiest, time.optimizer_s),
        "offload": _offload(busiest, time),
        "overhead": _overhead(busiest, time),
    }


def utilization(time: StepTime) -> Derivation | None:
    """Of model FLOPs utilization; None where no peak is known."""
    mfu, peak = time.mfu_causal, time.peak_flops
    if mfu is None or peak is None:
        return None
    flops = mfu * peak / time.tokens_per_s_per_gpu
    return Derivation(
        mfu,
        "tokens * flops_per_token / (step_s * gpus * peak_flops_per_s)",
        {
            "tokens": time.tokens,
            "flops_per_token": flops,
            "step_s": time.total_s,
            "gpus": time.gpus,
            "peak_flops_per_s": peak,
        },
        "PaLM, arXiv:2204.02311, appendix B; attention counted as masked",
    )


def _layers(busiest: BusiestStage, compute: Mapping[str, float]) -> dict[str, Derivation]:
    """What the layers compute, by kind."""
    place, parts = busiest.place, busiest.parts
    machine, layer, spec = busiest.machine, parts.layer, place.workload.spec
    often = {
        "micro_batches": place.layout.gradient_accumulation,
        "layers": busiest.share.layers,
    }

    def passes(kind: str, suffix: str, scale: float = 1.0) -> dict[str, float]:
        one, two = getattr(layer.forward, kind), getattr(layer.backward, kind)
        return {f"forward_{suffix}": scale * one, f"backward_{suffix}": scale * two}

    flops = layer_flops(place.workload, place.slice)
    back = flops * (1 + spec.trained_products) * (spec.reached if place.layout.pp == 1 else 1.0)
    one_layer = layer.forward.matmul + layer.backward.matmul
    rate = _matmul_rate(busiest)
    matmul = {
        "forward_flops": flops,
        "backward_flops": back,
        "flops_per_s": rate,
        "shape": (flops + back) / one_layer / amount(rate),
    }
    memory = _share_of(machine.memory, "memory_bytes_per_s", "memory", busiest)
    moved = {**passes("elementwise", "bytes", machine.memory), "memory_bytes_per_s": memory}
    return {
        "matmul": Derivation(
            compute["matmul"],
            "micro_batches * layers * (forward_flops + backward_flops) / (flops_per_s * shape)",
            {**often, **matmul},
            "shape: what inner sizes leave (operators.py)",
        ),
        "attention": _attention(busiest, compute["attention"], often),
        "elementwise": Derivation(
            compute["elementwise"],
            "micro_batches * layers * (forward_bytes + backward_bytes) / memory_bytes_per_s",
            {**often, **moved},
            "bytes: operands read and written by norms, sums, rotary, activation function",
        ),
        "launch": Derivation(
            compute["launch"],
            "micro_batches * layers * (forward_s + backward_s)",
            {**often, **passes("launch", "s")},
            f"gaps between kernels; {_origin('kernel.gap_s')}",
        ),
        "recompute": Derivation(
            compute["recompute"],
            "micro_batches * recomputed * layer_s",
            {
                "micro_batches": often["micro_batches"],
                "recomputed": parts.recomputed[busiest.share.stage],
                "layer_s": _kinds(layer.recompute),
            },
            "the part of a forward pass that the backward pass repeats",
        ),
    }


def _kinds(one: Pass) -> Symbol:
    kinds = ("matmul", "attention", "elementwise", "launch")
    found = total(one.total, {f"{kind}_s": getattr(one, kind) for kind in kinds})
    return found if len(found.symbols) > 1 else one.total


def _origin(name: str) -> str:
    return TABLE[name].origin


def _share_of(value: float, what: str, name: str, busiest: BusiestStage) -> Symbol:
    """A rate as a share of the data sheet's peak, unless it was measured."""
    gpu, share = busiest.place.cluster.gpu, busiest.place.efficiency[name]
    if gpu.measured is not None or gpu.generation == "cpu":
        return value
    return Derivation(
        value,
        f"peak_{what} * share",
        {f"peak_{what}": value / share, "share": share},
        _origin(name),
    )


def _matmul_rate(busiest: BusiestStage) -> Symbol:
    gpu, value = busiest.place.cluster.gpu, busiest.machine.matmul
    if busiest.place.workload.precision == "fp8":  # some layers stay in 16 bits
        return value
    return _share_of(value, "flops_per_s", f"matmul.{gpu.like or gpu.name}", busiest)


def _attention(busiest: BusiestStage, value: float, often: Mapping[str, float]) -> Derivation:
    place, machine, layer = busiest.place, busiest.machine, busiest.parts.layer
    if place.workload.attention != "fused":
        passes = {"forward_s": layer.forward.attention, "backward_s": layer.backward.attention}
        formula = "micro_batches * layers * (forward_s + backward_s)"
        return Derivation(value, formula, {**often, **passes}, "scores are read and written")
    flops, rate = fused_attention(place.workload, place.slice, machine)
    kernel = f"attention.{attention_kernel(place.cluster.gpu, place.workload)}"
    back = BACKWARD_SCORES * (place.workload.spec.reached if place.layout.pp == 1 else 1.0)
    return Derivation(
        value,
        "micro_batches * layers * flops / flops_per_s * (1 + backward / backward_rate)",
        {
            **often,
            "flops": flops,
            "flops_per_s": rate,
            "backward": back,
            "backward_rate": machine.efficiency["attention.backward"],
        },
        f"{_origin(kernel)}; FlashAttention-2, arXiv:2307.08691",
    )


def _head(busiest: BusiestStage, value: float) -> Derivation:
    ahead, back = busiest.parts.head
    return Derivation(
        value,
        "micro_batches * (forward_s + backward_s)",
        {
            "micro_batches": busiest.place.layout.gradient_accumulation,
            "forward_s": _kinds(ahead),
            "backward_s": _kinds(back),
        },
        "the head's products, and the loss's reads and writes per logit",
    )


# Communication


def _waiting(busiest: BusiestStage, waited: Mapping[str, float]) -> dict[str, Derivation]:
    """What computation waits for, by kind."""
    place, traffic, layout = busiest.place, busiest.parts.traffic, busiest.place.layout
    data, often = busiest.data, {"micro_batches": layout.gradient_accumulation}
    inside = often | {"layers": busiest.share.layers}
    tensor: dict[str, Symbol] = {
        "forward_s": _collectives(traffic.tensor, layer_collectives(place)),
        "backward_s": traffic.tensor_back,
    }
    terms = ["layers * (forward_s + backward_s)"]
    if traffic.tensor_again:
        terms.append("recomputed * again_s")
        tensor["recomputed"] = busiest.parts.recomputed[busiest.share.stage]
        tensor["again_s"] = traffic.tensor_again
    found = {
        "tensor": Derivation(
            waited["tensor"],
            f"micro_batches * ({' + '.join(terms)})",
            {**inside, **tensor},
            _TENSOR,
        ),
        "context": _context(busiest, waited["context"], inside),
        "expert": Derivation(
            waited["expert"],
            "micro_batches * layers * 2 * forward_s",
            {**inside, "forward_s": traffic.expert},
            "all-to-all of the tokens, there and back",
        ),
        "pipeline": Derivation(
            waited["pipeline"],
            "messages * message_s",
            {"messages": messages_waited(place), "message_s": pipeline_message_s(place)},
            f"an activation and a gradient per chunk: {_BUBBLE}",
        ),
        "data_gather": _overlapped(waited["data_gather"], data.gather),
        "data_reduce": _overlapped(waited["data_reduce"], data.reduce),
    }
    return {f"waiting: {kind}": one for kind, one in found.items()}


def _context(busiest: BusiestStage, value: float, inside: Mapping[str, float]) -> Derivation:
    """What a context group exchanges, and its gradients."""
    traffic = busiest.parts.traffic
    symbols: dict[str, Symbol] = {
        **inside,
        "forward_s": _collectives(traffic.context, traffic.exchanged),
    }
    formula = "micro_batches * layers * 2 * forward_s"
    if traffic.context_again:
        formula += " + micro_batches * recomputed * again_s"
        symbols["recomputed"] = busiest.parts.recomputed[busiest.share.stage]
        symbols["again_s"] = traffic.context_again
    source = GATHERED if busiest.place.context.heads == 1 else SENT
    return Derivation(value, formula, symbols, source)


def _overlapped(value: float, parts: Mapping[str, Overlapped]) -> Derivation:
    exposed: dict[str, Symbol] = {
        f"{name}_s": Derivation(
            one.exposed_s,
            "times * max(sent_s - computed_s, slowed * sent_s)",
            {
                "times": one.times,
                "sent_s": _collectives(one.sent_s, one.sent),
                "computed_s": one.computed_s,
                "slowed": one.slowed,
            },
            _NOT_HIDDEN,
        )
        for name, one in parts.items()
        if one.times
    }
    return total(value, exposed)


def _collectives(value: float, sent: "list[Collectives] | tuple[Collectives, ...]") -> Symbol:
    """The first of some collectives by its formula, the others by their time."""
    if not sent or sum(one.seconds for one in sent) != value:
        return value
    names = [one.kind for one in sent]
    symbols: dict[str, Symbol] = {}
    for one in sent:
        again = f"_{len(symbols) + 1}" if names.count(one.kind) > 1 else ""
        symbols[f"{one.kind}{again}_s"] = _collective(one)
    return total(value, symbols)


def _collective(one: Collectives) -> Derivation:
    group, times = one.group, one.times
    if one.kind == "all_to_all":
        return Derivation(
            one.seconds,
            "times * own_bytes * max(near / near_bytes_per_s, far / far_bytes_per_s)",
            {
                "times": times,
                "own_bytes": one.nbytes,
                "near": group.near_share,
                "near_bytes_per_s": group.links.near_bytes_per_s,
                "far": group.far_share,
                "far_bytes_per_s": group.links.far_bytes_per_s,
            },
            _SENT_TO_ALL,
        )
    symbols = {
        "times": times * (2 if one.kind == "all_reduce" else 1),
        "tensor_bytes": one.nbytes,
        "ranks": group.size,
        "link_bytes_per_s": group.bytes_per_s,
    }
    formula = "times * tensor_bytes * (ranks - 1) / ranks / link_bytes_per_s"
    return Derivation(one.seconds, formula, symbols, _RING)


# The rest


def _optimizer(busiest: BusiestStage, value: float) -> Derivation:
    place, away = busiest.place, busiest.place.layout.offload_optimizer != "none"
    parameters = updated_parameters(place.layout, busiest.share.trained)
    moved = place.workload.cost.cpu_update_bytes if away else UPDATE_BYTES
    rate = _share_of(busiest.machine.memory, "memory_bytes_per_s", "memory", busiest)
    if away:
        cluster = place.cluster
        on_node = min(cluster.gpus_per_node, place.layout.world)
        share = place.efficiency["host.memory"]
        rate = cluster.host_memory_bytes_per_s * share / on_node
    symbols: dict[str, Symbol] = {
        "moved_bytes": moved,
        "trained": parameters,
        "memory_bytes_per_s": rate,
    }
    formula = "moved_bytes * trained / memory_bytes_per_s"
    owners = value - moved * parameters / amount(rate)
    if place.workload.updates and not away:
        formula, symbols["owners_s"] = f"{formula} + owners_s", owners
    where = "on the host, by its processors" if away else "read and written"
    return Derivation(value, formula, symbols, f"bytes of AdamW per parameter, {where}")


def _offload(busiest: BusiestStage, time: StepTime) -> Derivation:
    passes = busiest.passes[busiest.share.stage]
    sent = offload_parts_s(busiest.place, busiest.share, time.optimizer_s, *passes)
    source = "ZeRO-Offload, arXiv:2101.06840; ZeRO-Infinity, arXiv:2104.07857"
    return total(time.offload_s, {f"{name}_s": one for name, one in sent.items()}, source)


def _overhead(busiest: BusiestStage, time: StepTime) -> Derivation:
    place = busiest.place
    nodes = place.layout.world / place.cluster.gpus_per_node
    if nodes <= 1:
        return Derivation(0.0, "0", {})
    return Derivation(
        time.overhead_s,
        "spread * sqrt(2 * log(nodes)) * computed_s",
        {
            "spread": place.efficiency["straggler"],
            "nodes": nodes,
            "computed_s": sum(time.compute.values()) + time.bubble_s,
        },
        f"spread of the nodes' speeds: {_origin('straggler')}",
    )
