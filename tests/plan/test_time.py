"""Step time: formulas by hand, limits of the roofline, what must never slow a run down, and a
few published runs."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.plan.making import TINY, recipe
from toolkit.errors import PlanError
from toolkit.layout import Layout, Pair
from toolkit.models.families import model_spec
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.efficiency import DEFAULT
from toolkit.plan.cost.memory import peak_memory
from toolkit.plan.cost.operators import device, matmul_s
from toolkit.plan.cost.stages import stage_share
from toolkit.plan.cost.time import StepTime, step_time
from toolkit.plan.cost.traffic import Links, links, update_symbols
from toolkit.plan.cost.workload import Setup, Workload, workload_of
from toolkit.plan.hardware.cluster import Cluster, default_cluster, parse_cluster
from toolkit.plan.request import PlanRequest


def gpt(layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelSpec:
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048}
    return model_spec({"model_type": "gpt2", **sizes, "vocab_size": vocab})


def llama(
    layers: int, hidden: int, heads: int, kv: int, inner: int, vocab: int, **more: object
) -> ModelSpec:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocab}
    return model_spec({"model_type": "llama", **sizes, **counts, **more})


LLAMA_8B = llama(32, 4096, 32, 8, 14336, 128256)
LLAMA_70B = llama(80, 8192, 64, 8, 28672, 128256)
MODERN = Workload(LLAMA_8B, 8192, "bf16", "megatron")
FSDP = Workload(LLAMA_8B, 8192, "bf16", "fsdp")
# Megatron before 2022: fp16, scores in memory, dropout, nothing beside computation.
EARLY: Any = partial(
    Workload, sequence_length=2048, precision="fp16", engine="megatron", attention="unfused",
    dropout=True, reduce_overlap=False,
)  # fmt: skip
H100 = parse_cluster("8x8xh100-80gb")


# Collectives


def test_a_ring_moves_what_the_formula_says() -> None:
    # Two all-reduces of 8,192 tokens over 8 ranks: 4 · 7/8 of their bytes.
    found = step_time(MODERN, Layout(dp=8, tp=8), H100)
    rate = 450e9 * DEFAULT["link.nvlink"]
    assert found["tensor_s"] == pytest.approx(4 * 7 / 8 * 2 * 8192 * 4096 / rate)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        # A ring over 4 nodes of 8 uses every member's adapter: 8 · 10 GB/s leave a node.
        (Links(8, 100e9, 10e9).ring(32, 1), 80e9),
        (Links(1, 100e9, 10e9).ring(4, 1), 10e9),
        (Links(8, 100e9, 10e9).ring(8, 1), 100e9),
        # 16 ranks on 2 nodes: half of 16/15 of what each sends leaves its node.
        (Links(8, 100e9, 10e9).exchange(16, 1), 15 / 16 / 0.5 * 10e9),
        # Data parallel beside tensor 8: one rank of each node.
        (links(H100, DEFAULT).islands(8, 8), 8),
        (links(H100, DEFAULT).islands(32, 2), 8),
        (links(parse_cluster("18x4xgb200"), DEFAULT).islands(72, 1), 1),
    ],
)
def test_groups_are_limited_by_what_leaves_a_node(found: float, expected: float) -> None:
    assert found == pytest.approx(expected)


# Operators


def rates(cluster: Cluster = H100, workload: Workload = MODERN) -> Any:
    return device(cluster.gpu, workload, DEFAULT)


def test_a_large_product_reaches_the_sustained_rate() -> None:
    machine, size = rates(), 132 * 256
    seconds = matmul_s(size, size, size, machine)
    assert 2 * size**3 / seconds == pytest.approx(machine.matmul, rel=0.03)
    assert machine.matmul == pytest.approx(989.5e12 * DEFAULT["matmul.h100-80gb"])


def test_a_thin_product_takes_the_time_of_reading_its_weights() -> None:
    machine = rates()
    seconds = matmul_s(1, 8192, 8192, machine)
    assert seconds == pytest.approx(2 * 8192 * 8192 / machine.memory, rel=0.01)


def test_fused_attention_by_hand() -> None:
    # 8,192 tokens, 32 layers, heads of 128: 4 · tokens · hidden · sequence / 2 FLOPs ahead, at
    # the kernel's rate times s / (s + half), and 2.5 times that back at the backward rate.
    layout = Layout(dp=1, micro_batch=1)
    found = step_time(MODERN, layout, parse_cluster("1xh100-80gb"))
    rate = 989.5e12 * DEFAULT["attention.hopper.te"] * 8192 / (8192 + 500)
    forward = 32 * 4 * 8192 * 4096 * 8192 / 2 / rate
    expected = forward * (1 + 2.5 / DEFAULT["attention.backward"])
    assert found["attention"] == pytest.approx(expected)


def test_a_sliding_window_skips_keys() -> None:
    windowed = replace(LLAMA_8B, sliding_window=1024, sliding_layers=32)
    cluster = parse_cluster("1xh100-80gb")
    full = step_time(MODERN, Layout(), cluster)["attention"]
    some = step_time(replace(MODERN, spec=windowed), Layout(), cluster)["attention"]
    # 1,024 keys but for the first queries: 1,024 · (1 - 1/16), instead of 4,096.
    assert some / full == pytest.approx(1024 * (1 - 1 / 16) / 4096)


def test_a_tiny_model_waits_between_kernels() -> None:
    tiny = Workload(gpt(4, 128, 4, vocab=512), 64, "bf16", "ddp")
    found = step_time(tiny, Layout(), parse_cluster("1xh100-80gb"))
    kernels = 3 * 4 * 14  # forward and twice as many backward, four layers, 14 kernels each
    assert found["launch"] == pytest.approx(kernels * DEFAULT["kernel.gap_s"])
    assert found["launch"] > 0.5 * found["computed_s"]


def test_measured_speeds_replace_shares_of_peaks() -> None:
    plain = parse_cluster("8xh100-80gb")
    measured = replace(plain.gpu, measured=replace(plain.gpu, bf16=500e12, measured=None))
    cluster = replace(plain, gpu=measured)
    assert rates(cluster).matmul == 500e12
    link = replace(plain.node_link, measured_bytes_per_s=123e9)
    assert links(replace(plain, node_link=link), DEFAULT).near == 123e9


# The step


def test_some_recomputed_layers_take_their_share() -> None:
    none, some, full = (
        step_time(MODERN, Layout(dp=8, zero_stage=3, recompute=way), H100)
        for way in ("none", 8, "full")  # type: ignore[arg-type]
    )
    share = 8 / MODERN.spec.layers
    assert some["recompute"] == pytest.approx(share * full["recompute"])
    assert none["recompute"] == 0


def test_the_bubble_is_that_of_the_schedule() -> None:
    # Equal stages: (p - 1)/m of the ideal time, (p - 1)/(v·m) interleaved (Narayanan et al.
    # 2021, section 2.2). The vocabulary is small, so that stages are nearly equal.
    workload = replace(MODERN, spec=llama(32, 4096, 32, 8, 14336, 64))
    for chunks in (1, 4):
        layout = Layout(dp=1, pp=8, vpp=chunks, micro_batch=1, gradient_accumulation=32)
        found = step_time(workload, layout, parse_cluster("8xh100-80gb"))
        ideal = found["computed_s"] - found["bubble"]
        assert found["bubble"] / ideal == pytest.approx(7 / (chunks * 32), rel=0.01)


def test_filling_the_pipeline_waits_for_every_message() -> None:
    layout = Layout(dp=1, pp=8, micro_batch=1, gradient_accumulation=8)
    found = step_time(MODERN, layout, parse_cluster("8xh100-80gb"))
    message = 2 * 8192 * 4096 / (450e9 * DEFAULT["link.nvlink"])
    # Two per micro batch, and seven there and seven back.
    assert found["waiting_pipeline"] == pytest.approx(message * (2 * 8 + 14))


def test_fsdp_gathers_for_every_micro_batch_and_slows_computation() -> None:
    once = Layout(dp=8, zero_stage=3, micro_batch=4, gradient_accumulation=1)
    cluster = parse_cluster("8xh100-80gb")
    found = step_time(FSDP, once, cluster)
    thrice = step_time(FSDP, replace(once, gradient_accumulation=3), cluster)
    # Two gathers in 16 bits and a reduction in 32, all beside longer computation.
    rate = links(cluster, DEFAULT).ring(8, 1)
    once_s = DEFAULT["overlap.fsdp"] * 7 / 8 * LLAMA_8B.parameters.total / rate
    assert found["waiting_gather"] == pytest.approx(2 * once_s, rel=0.03)
    assert found["waiting_reduce"] == pytest.approx((2 + 4) * once_s, rel=0.03)
    for kind in ("waiting_gather", "waiting_reduce"):
        assert thrice[kind] == pytest.approx(3 * found[kind])


def test_experts_travel_and_split_the_weights() -> None:
    mixtral = llama(32, 4096, 32, 8, 14336, 32000, model_type="mixtral")
    workload = Workload(mixtral, 4096, "bf16", "megatron")
    whole = Layout(dp=8, zero_stage=1, gradient_accumulation=4)
    cluster = parse_cluster("8xh100-80gb")
    one, spread = (step_time(workload, replace(whole, ep=ep), cluster) for ep in (1, 8))
    # Two tokens' worth of 7/8 of the hidden state leave twice a pass, four micro batches.
    sent = 2 * 4096 * 2 * 4096 * 7 / 8 / (450e9 * DEFAULT["link.nvlink"])
    assert one["waiting_expert"] == 0
    assert spread["waiting_expert"] == pytest.approx(4 * 32 * 2 * 2 * sent)
    assert spread["elementwise"] < one["elementwise"]  # fewer gradients


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(PlanError, match="v100-32gb has no bf16"):
        step_time(MODERN, Layout(), parse_cluster("1xv100-32gb"))


OFFLOADED: dict[str, Any] = {"offload_optimizer": "cpu", "dp": 8}
ON_HOST = OFFLOADED | {"offload_parameters": "cpu"}


@pytest.mark.parametrize(
    ("engine", "precision", "layout", "copied"),
    [
        # Weights of each pass, sums of a backward pass and the last one's, after the update.
        ("deepspeed", "bf16", Layout(zero_stage=1, **OFFLOADED), (0, 0, 4, 2)),
        ("deepspeed", "bf16", Layout(zero_stage=2, **OFFLOADED), (0, 0, 4, 2)),
        ("deepspeed", "fp32", Layout(zero_stage=2, **OFFLOADED), (0, 0, 4, 4)),
        ("deepspeed", "bf16", Layout(zero_stage=3, **OFFLOADED), (0, 8, 4, 2)),
        ("deepspeed", "bf16", Layout(zero_stage=3, **ON_HOST), (2, 8, 4, 0)),
        ("fsdp", "bf16", Layout(zero_stage=3, **ON_HOST), (4, 4, 0, 0)),
    ],
)
def test_bytes_that_offload_copies(
    engine: Any, precision: Any, layout: Layout, copied: tuple[int, ...]
) -> None:
    """Per parameter of the shard: read from DeepSpeed 0.19.8 and FSDP2."""
    workload = replace(MODERN, engine=engine, precision=precision)
    cluster = parse_cluster("8xh100-80gb")
    share = stage_share(LLAMA_8B, 1, 1, 1, 1, 0)

    def copied_by(accumulation: int) -> list[float]:
        split = replace(layout, gradient_accumulation=accumulation)
        symbols = update_symbols(Setup(workload, split, cluster), share, 1.0)
        names = ("loaded", "sums", "last_sums", "returned")
        return [symbols[f"{name}_bytes"] for name in names]

    found = copied_by(1)
    assert found == pytest.approx([n * share.parameters / 8 for n in copied])
    expected = [share.parameters, 0.0] if precision == "fp32" else found[1:3]
    assert copied_by(4)[1:3] == expected, "fp32 gradients are summed on the host"


def test_offload_is_not_free_beside_long_passes() -> None:
    layout = Layout(zero_stage=3, micro_batch=8, gradient_accumulation=2, **ON_HOST)
    found = step_time(replace(MODERN, engine="deepspeed"), layout, parse_cluster("8xh100-80gb"))
    cluster = parse_cluster("8xh100-80gb")
    rate = cluster.host_link_bytes_per_s * DEFAULT["link.host"]
    nbytes = 2 * (2 * found["loaded_bytes"] + found["sums_bytes"]) + found["last_sums_bytes"]
    assert found["offload"] == pytest.approx(DEFAULT["overlap.host"] * nbytes / rate)


# What must never slow a run down

LAYOUTS = [
    Layout(dp=64, zero_stage=3, micro_batch=1, gradient_accumulation=2),
    Layout(dp=8, tp=8, sequence_parallel=True, zero_stage=1, gradient_accumulation=16),
    Layout(dp=8, tp=2, pp=4, vpp=2, zero_stage=1, gradient_accumulation=16),
    Layout(dp=4, tp=2, pp=4, cp=2, zero_stage=1, gradient_accumulation=32),
    Layout(dp=64, micro_batch=2, gradient_accumulation=1),
]


def engine_of(layout: Layout) -> Workload:
    return FSDP if layout.zero_stage == 3 else MODERN


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_faster_hardware_is_never_slower(layout: Layout) -> None:
    workload = engine_of(layout)
    before = step_time(workload, layout, H100).total_s
    fast_link = replace(H100.node_link, bytes_per_s=2 * H100.node_link.bytes_per_s)
    fast_network = replace(H100.network, bytes_per_s=2 * H100.network.bytes_per_s)
    memory = H100.gpu.memory_bytes_per_s
    assert memory is not None
    for faster in (
        replace(H100, node_link=fast_link),
        replace(H100, network=fast_network),
        replace(H100, gpu=replace(H100.gpu, memory_bytes_per_s=2 * memory)),
        replace(H100, gpu=replace(H100.gpu, bf16=2 * 989.5e12)),
    ):
        assert step_time(workload, layout, faster).total_s <= before


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_more_recompute_is_never_faster(layout: Layout) -> None:
    workload = engine_of(layout)
    times = [
        step_time(workload, replace(layout, recompute=recompute), H100).total_s
        for recompute in ("none", "selective", "full")
    ]
    assert times == sorted(times)
    assert times[0] < times[2]


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_stage_2_reduces_every_micro_batch_and_stage_1_once(engine: str) -> None:
    workload = replace(MODERN, engine=engine)
    one, two = (
        step_time(workload, Layout(dp=64, zero_stage=stage, gradient_accumulation=4), H100)
        for stage in (1, 2)
    )
    assert two["waiting_reduce"] == pytest.approx(4 * one["waiting_reduce"])
    assert two["waiting_gather"] == one["waiting_gather"]


@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.parametrize(
    "pair", [Pair("deepspeed", "hf"), Pair("megatron", "megatron"), Pair("fsdp", "hf")], ids=str
)
def test_a_pair_of_samples_costs_what_two_sequences_do(pair: Pair, layout: Layout) -> None:
    deep = TINY | {"num_hidden_layers": 8}
    wanted = recipe(training__objective="dpo", model__config=deep)
    assert wanted.model.config is not None
    job = PlanRequest.of(wanted, wanted.cluster, wanted.model.config)
    alone = wanted.training.model_copy(update={"objective": "pretrain"})
    pairs, single = (workload_of(one, pair) for one in (job, job.asking(training=alone)))
    assert (pairs.rows_per_sample, single.rows_per_sample) == (2, 1)
    twice = replace(layout, micro_batch=2 * layout.micro_batch)
    assert peak_memory(pairs, layout) == peak_memory(single, twice)
    found, expected = (step_time(*each, H100) for each in ((pairs, layout), (single, twice)))
    assert found.total_s == pytest.approx(expected.total_s, rel=1e-12)
    assert found.tokens_per_s == pytest.approx(expected.tokens_per_s, rel=1e-12)


# Published runs, with the tolerance that such a prediction deserves


def near(found: StepTime, seconds: float, tolerance: float) -> None:
    assert found.total_s == pytest.approx(seconds, rel=tolerance)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "seconds"),
    [("full", False, 18.13), ("selective", True, 13.75)],
)
def test_gpt_175b_on_64_a100(recompute: Any, sequence_parallel: bool, seconds: float) -> None:
    # Korthikanti et al. 2022 (arXiv:2205.05198), table 5: 175B, 64 A100, batch 64.
    layout = Layout(
        dp=1, tp=8, pp=8, vpp=3, sequence_parallel=sequence_parallel, recompute=recompute,
        micro_batch=1, gradient_accumulation=64,
    )  # fmt: skip
    workload = EARLY(gpt(96, 12288, 96))
    near(step_time(workload, layout, default_cluster(8, 8, "a100-80gb")), seconds, 0.10)


def test_llama_8b_with_fsdp_on_8_h100() -> None:
    # torchtitan's benchmark of December 2024: 5,762 tokens per second and GPU eager, 6,667
    # compiled, on H100 of 96 GB and 500 W.
    layout = Layout(dp=8, zero_stage=3, recompute="selective", micro_batch=2)
    cluster = default_cluster(1, 8, "h100-96gb")
    for fused, rate in ((False, 5762), (True, 6667)):
        found = step_time(replace(FSDP, fused_elementwise=fused), layout, cluster)
        assert found.tokens_per_s_per_gpu == pytest.approx(rate, rel=0.08)
