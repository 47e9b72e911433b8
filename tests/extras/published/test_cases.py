"""Published cases: what sources print, and what their fields mean."""

from typing import Any

import pytest

from toolkit.extras.published.case import Case
from toolkit.extras.published.estimates import estimate_case
from toolkit.plan.cost.memory import stage_memory
from toolkit.text.units import GIB

GB = 1e9


def case(model: dict[str, Any], gpu: str, gpus: int, **fields: Any) -> dict[str, Any]:
    """A case of a file; `layout` and `batch` as they are stated."""
    hardware = {"gpu": gpu, "n_gpus": gpus}
    defaults = {"id": "one", "layout": {}, "batch": {}, "precision": "bf16", "notes": ""}
    return defaults | {"model": model, "hardware": hardware} | fields


def counted(parameters: float, ranks: int, stage: int, **model: Any) -> dict[str, Any]:
    """A case of which only the number of parameters is known."""
    layout = {"dp": ranks, "zero_stage": stage} | model.pop("layout", {})
    wanted = {"name": "counted", "params": parameters} | model
    return case(wanted, "V100-32GB", ranks, layout=layout, precision="fp16+fp32 Adam")


@pytest.mark.parametrize(
    ("billions", "ranks", "printed"),
    [
        # ZeRO, arXiv:1910.02054, figure 1 and table 1: GB at stages 1, 2 and 3.
        (7.5, 4, (52.5, 41.3, 30)),
        (7.5, 64, (31.4, 16.6, 1.88)),
        (7.5, 1024, (30.1, 15.1, 0.12)),
        (128, 64, (536, 284, 32)),
        (1000, 1024, (4011, 2013, 15.6)),
    ],
)
def test_figures_of_the_zero_paper(
    billions: float, ranks: int, printed: tuple[float, ...]
) -> None:
    for stage, figure in enumerate(printed, start=1):
        result = estimate_case(counted(billions * 1e9, ranks, stage))
        digits = len(str(figure).partition(".")[2])
        found = result["memory_gib"]["model_states"] * GIB / GB
        # The paper rounds some figures and cuts others.
        assert abs(found - figure) < 10**-digits
    assert estimate_case(counted(7.5e9, 64, 0))["memory_gib"]["model_states"] * GIB == 120e9


def test_the_zero_tutorial() -> None:
    """DeepSpeed's tutorial: 1.5 B parameters, 18 GB of Adam on 1 device, 2.25 on 8."""
    shape = {"layers": 48, "hidden": 1600, "heads": 16, "vocab": 50257}
    for stage, gigabytes in ((0, 18), (1, 2.25)):
        result = estimate_case(counted(1.5e9, 8, stage, **shape))
        assert result["memory_gib"]["optimizer"] * GIB == gigabytes * GB


@pytest.mark.parametrize(
    ("stage", "offload", "zero_init", "gpu_gib", "host_gib"),
    [
        # DeepSpeed's documentation (memory.rst), `..._mem_needs_all_cold` of t5-3b: 2,851 M
        # parameters, the largest layer 32 M, 8 GPUs. Our inputs are those rounded counts.
        (2, "optimizer->CPU", 1, 5.31, 127.45),
        (2, None, 1, 15.93, 127.45),
        (3, "params+optimizer->CPU", 1, 0.12, 71.69),
        (3, "params+optimizer->CPU", 0, 0.12, 127.45),
        (3, "optimizer->CPU", 1, 0.78, 63.72),
        (3, "optimizer->CPU", 0, 0.78, 127.45),
        (3, None, 1, 6.09, 1.43),
        (3, None, 0, 6.09, 127.45),
    ],
)
def test_figures_of_deepspeeds_estimator(
    stage: int, offload: str | None, zero_init: int, gpu_gib: float, host_gib: float
) -> None:
    layout = {"offload": offload, "zero_init": zero_init}
    asked = counted(2851e6, 8, stage, largest_layer_params=32e6, layout=layout)
    found = estimate_case(asked)["memory_gib"]
    assert found["model_states"] == pytest.approx(gpu_gib, abs=0.0051)
    assert found["host_per_node"] == pytest.approx(host_gib, abs=0.0051)


def test_only_model_states_never_fit_for_sure() -> None:
    assert estimate_case(counted(7.5e9, 64, 0))["fits"] is False
    assert estimate_case(counted(7.5e9, 64, 3))["fits"] is None


LLAMA_8B = {
    "name": "Llama-3-8B", "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32,
    "kv_heads": 8, "vocab": 128256, "seq": 8192, "mlp": "swiglu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpus", "mode", "reserved_gib"),
    [
        # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3: peak
        # reserved memory of FSDP2 with selective recompute per operator, local batch 2.
        (8, "eager", 82.4),
        (8, "compile", 77.0),
        (128, "eager", 67.0),
        (128, "compile", 62.0),
    ],
)
def test_reserved_memory_of_torchtitan(gpus: int, mode: str, reserved_gib: float) -> None:
    layout = {"dp": gpus, "zero_stage": 3, "recompute": "selective(op)"}
    batch = {"micro": 2, "global": 2 * gpus}
    asked = case(LLAMA_8B, "H100-96GB", gpus, layout=layout, batch=batch, notes=mode)
    result = estimate_case(asked)
    assert result["memory_gib"]["total"] == pytest.approx(reserved_gib, rel=0.08)
    assert result["fits"] is True


GPT_7B = {
    "name": "gpt", "layers": 32, "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 8,
    "vocab": 131073, "seq": 8192, "untied": True, "mlp": "gelu",
}  # fmt: skip


def test_allocated_memory_of_megatrons_last_rank() -> None:
    """Megatron-LM's functional test gpt3_7b_tp1_pp4_memory_speed, golden values of DGX H100:
    56.55 GiB at most allocated on the last rank, with 8 chunks of one layer per rank."""
    layout = {"dp": 2, "tp": 1, "pp": 4, "vpp": 8, "zero_stage": 1, "recompute": "none"}
    batch = {"micro": 1, "global": 8}
    result = estimate_case(case(GPT_7B, "H100-80GB", 8, layout=layout, batch=batch))
    assert result["memory_gib"]["total"] == pytest.approx(56.55, rel=0.08)
    assert result["fits"] is True
    parts = result["memory_gib"]
    shown = parts["model_states"] + parts["activations"] + parts["other"]
    assert shown == pytest.approx(parts["total"])
    assert result["step_time_s"] > 0
    assert result["tokens_per_s_per_gpu"] == pytest.approx(8192 / result["step_time_s"])


def test_totals_are_what_an_engines_log_shows() -> None:
    """Megatron-LM logs its last rank; papers before flash attention computed the first."""
    layout = {"dp": 2, "pp": 4, "vpp": 1, "zero_stage": 1, "recompute": "none"}
    asked = case(GPT_7B, "H100-80GB", 8, layout=layout, batch={"micro": 1, "global": 64})
    for kernel, stage in (("flash", 3), ("unfused", 0)):
        wanted = asked | {"attention_kernel": kernel}
        setup = Case(wanted).setup()
        memory = stage_memory(setup.workload, setup.layout, stage)
        assert estimate_case(wanted)["memory_gib"]["total"] * GIB == memory.allocated


def test_what_ran_out_of_memory_does_not_fit() -> None:
    """torchtitan, docs/performance.md (2024): Llama 2 70B on 64 A100, selective recompute
    per operator; local batch 1 ran, 2 ran out of memory, and ran with full recompute."""
    model = {
        "name": "Llama-2-70B", "layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64,
        "kv_heads": 8, "vocab": 32000, "seq": 4096, "mlp": "swiglu",
    }  # fmt: skip

    def fits(micro: int, recompute: str) -> Any:
        layout = {"dp": 64, "zero_stage": 3, "recompute": recompute}
        batch = {"micro": micro, "global": 64 * micro}
        asked = case(model, "A100-80GB", 64, layout=layout, batch=batch)
        return estimate_case(asked)["fits"]

    assert fits(1, "selective(op)") is True
    assert fits(2, "selective(op)") is False
    assert fits(2, "full") is True


MPT_3B = {
    "name": "MPT-3b", "layers": 32, "hidden": 2560, "ffn": 10240, "heads": 20, "kv_heads": 20,
    "vocab": 50368, "mlp": "gelu",
}  # fmt: skip


@pytest.mark.parametrize(("sequence", "micro"), [(512, 40), (2048, 10), (8192, 3), (16384, 1)])
def test_the_largest_micro_batch_of_llm_foundry(sequence: int, micro: int) -> None:
    """llm-foundry's benchmarks, A100 80GB: without recompute, the micro batch that fitted."""
    layout = {"dp": 8, "zero_stage": 3, "recompute": "none", "fsdp_mp_mode": "DEFAULT"}

    def fits(size: int) -> Any:
        batch = {"micro": size, "global": 8 * size}
        model = MPT_3B | {"seq": sequence}
        asked = case(model, "A100-80GB", 8, layout=layout, batch=batch, precision="amp_bf16")
        return estimate_case(asked)["fits"]

    assert fits(micro) is True
    assert fits(2 * micro) is False


# What fields mean


def test_what_was_reported_is_never_read() -> None:
    layout = {"dp": 8, "zero_stage": 3}
    asked = case(LLAMA_8B, "H100-80GB", 8, layout=layout, source="a", kind="measured")
    honest = estimate_case(asked)
    assert estimate_case(asked | {"reported": {"mem_gb_per_gpu": 1}, "source": "b"}) == honest
    assert estimate_case(asked | {"kind": "formula", "citation": "c"}) == honest


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ("A100", "a100-80gb"), ("A100-40GB", "a100-40gb"), ("V100-32GB", "v100-32gb"),
        ("H100-96GB HBM2e 500W", "h100-96gb"), ("GB200", "gb200"), ("H200", "h200"),
        ("NVIDIA H100 80GB PCIe", "h100-80gb-pcie"), ("MI300X", "mi300x"), ("any", None),
    ],
)  # fmt: skip
def test_names_of_accelerators(stated: str, name: str | None) -> None:
    assert Case(case(LLAMA_8B, stated, 8)).gpu == name


def test_defaults_of_unstated_fields() -> None:
    layout = {"tp": 4, "pp": 4, "zero_stage": 1, "dp": None, "vpp": None, "recompute": None}
    asked = case(LLAMA_8B, "H100-80GB", 64, layout=layout, batch={"micro": 1, "global": 64})
    setup = Case(asked).setup()
    assert (setup.workload.engine, setup.workload.attention) == ("megatron", "fused")
    assert (setup.layout.dp, setup.layout.gradient_accumulation) == (4, 16)
    # 8 layers per stage: chunks of two. No recompute is needed.
    assert (setup.layout.vpp, setup.layout.recompute) == (4, "none")
    assert setup.layout.sequence_parallel
    assert (setup.cluster.nodes, setup.cluster.gpus_per_node) == (8, 8)
    long = asked | {"model": LLAMA_8B | {"seq": 131072}, "layout": layout | {"tp": 8, "pp": 1}}
    assert Case(long).setup().layout.recompute == "full"
    # NeMo's recipes, which leave recompute open, sum gradients in bf16.
    assert (setup.workload.gradient_bytes, setup.workload.reduce_bytes) == (2, 2)
    stated = asked | {"layout": layout | {"recompute": "none"}}
    assert Case(stated).setup().workload.gradient_bytes is None
    old = case(GPT_7B, "A100", 64, layout=layout, attention_kernel="unfused", precision="fp16")
    workload = Case(old | {"notes": "inter-node 800 Gb/s per 8-GPU node"}).setup().workload
    assert (workload.attention, workload.dropout, workload.reduce_overlap) == (
        "unfused", True, False,
    )  # fmt: skip
    assert workload.reduce_bytes == 2, "Megatron's buffer of gradients was in fp16"


def test_every_other_layer_is_full_recompute_of_half() -> None:
    layout = {"dp": 8, "zero_stage": 3, "recompute": "selective(every other layer)"}
    setup = Case(case(LLAMA_8B, "A100", 8, layout=layout)).setup()
    assert (setup.layout.recompute, setup.workload.recomputed_layers) == ("full", 0.5)


def test_a_pipeline_splits_torchtitans_batch() -> None:
    layout = {"dp": 2, "pp": 4, "zero_stage": 3, "recompute": "full"}
    asked = case(LLAMA_8B, "H100-96GB", 8, layout=layout, batch={"micro": 8, "global": 16})
    found = Case(asked).setup().layout
    assert (found.micro_batch, found.gradient_accumulation, found.global_batch) == (2, 4, 16)


def test_the_stated_network_is_used() -> None:
    asked = case(GPT_7B, "A100", 64, notes="8 GPUs; inter-node 800 Gb/s per 8-GPU node.")
    assert Case(asked).setup().cluster.network.bytes_per_s == 12.5 * GB


def test_what_cannot_be_predicted_says_why() -> None:
    unknown = estimate_case(case({"name": "x", "mlp": "gelu"}, "A100", 8))
    assert "neither its shape nor" in unknown["unsupported"]
    assert unknown["step_time_s"] is None
    other = estimate_case(case(LLAMA_8B, "TPU v4", 8))
    assert "not in the catalogue" in other["unsupported"]
    odd = estimate_case(case(LLAMA_8B, "A100", 8, layout={"recompute": "sometimes"}))
    assert "sometimes" in odd["unsupported"]


def test_llama_3_with_long_rows() -> None:
    """Llama 3, arXiv:2407.21783, table 4: on 16,384 GPUs with 16M tokens per step, 400 TFLOP/s
    each with rows of 8,192 tokens, and 380 with 131,072 over 16 ranks that gather keys and
    values."""
    shape = {
        "layers": 126, "hidden": 16384, "ffn": 53248, "heads": 128, "kv_heads": 8,
        "vocab": 128256, "mlp": "swiglu",
    }  # fmt: skip
    rates = []
    for length, dp, cp in ((8192, 128, 1), (131072, 8, 16)):
        layout = {"dp": dp, "tp": 8, "pp": 16, "cp": cp, "sp": True, "recompute": "none"}
        run = case(
            shape | {"name": "405B", "seq": length}, "H100-80GB", 16384, layout=layout,
            batch={"micro": 1, "global": 2**24 // length}, attention_kernel="flash",
            notes="all-gather",
        )  # fmt: skip
        rates.append(estimate_case(run)["mfu"])
    assert rates[1] / rates[0] == pytest.approx(380 / 400, rel=0.05)
