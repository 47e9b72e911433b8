"""Every formula that a plan prints evaluates to its number."""

from typing import Any

import pytest

from tests.plan.formulas import check
from tests.plan.making import optimizer_of
from toolkit.hardware.cluster import parse_cluster
from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.models.spec import ModelSpec
from toolkit.plan.cost.owned import owner_updates
from toolkit.plan.cost.workload import Workload
from toolkit.plan.estimate import Setup, estimate

CONFIG = {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 3584,
    "vocab_size": 32000, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_local_experts": 6, "tie_word_embeddings": False,
}  # fmt: skip


def dense(**changes: Any) -> ModelSpec:
    config = {key: value for key, value in CONFIG.items() if "experts" not in key}
    return model_spec(config | {"model_type": "llama"} | changes)


LAYOUTS: dict[str, tuple[str, Layout]] = {
    "ddp": ("ddp", Layout(dp=16)),
    "fsdp 3": ("fsdp", Layout(dp=16, zero_stage=3, recompute="full", gradient_accumulation=4)),
    "fsdp 2": ("fsdp", Layout(dp=16, zero_stage=2, gradient_accumulation=4, loss="chunked")),
    "replicas": ("fsdp", Layout(dp=16, zero_stage=3, replicate=2)),
    "deepspeed 1": ("deepspeed", Layout(dp=16, zero_stage=1, gradient_accumulation=2)),
    "cpu": ("deepspeed", Layout(dp=16, zero_stage=2, offload_optimizer="cpu")),
    "nvme": ("deepspeed", Layout(
        dp=16, zero_stage=3, offload_optimizer="nvme", offload_parameters="cpu")),
    "pipeline": ("megatron", Layout(
        dp=2, tp=2, pp=4, vpp=2, sequence_parallel=True, zero_stage=1, micro_batch=2,
        gradient_accumulation=8, recompute="selective")),
    "some layers": ("fsdp", Layout(dp=16, zero_stage=3, recompute=3)),
    "some of each chunk": ("megatron", Layout(
        dp=4, pp=4, vpp=2, tp=1, zero_stage=1, gradient_accumulation=8, recompute=1)),
    "some of each stage": ("megatron", Layout(
        dp=4, pp=2, tp=2, zero_stage=1, gradient_accumulation=8, recompute=1)),
    "gathered keys": ("fsdp", Layout(
        dp=4, cp=4, zero_stage=3, recompute="full", gradient_accumulation=4)),
    "sent heads": ("deepspeed", Layout(dp=8, cp=2, zero_stage=2, exchange="ulysses")),
    "experts": ("megatron", Layout(dp=8, tp=2, ep=2, zero_stage=1, experts="grouped")),
}  # fmt: skip
OFFLOADED = ("cpu", "nvme")


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_number_has_a_formula(name: str) -> None:
    engine, layout = LAYOUTS[name]
    spec, cluster = model_spec(CONFIG), parse_cluster("2x8xh100-80gb")
    specs = [spec, dense(), dense(tie_word_embeddings=True)]
    seen = set()
    for one in specs if layout.ep == 1 else specs[:1]:
        for precision, length in (("bf16", 2048), ("fp32", 256), ("fp8", 2048)):
            workload = Workload(
                one, length, precision, engine,  # type: ignore[arg-type]
                model="megatron" if engine == "megatron" else "hf", fused_elementwise=False,
                document_mask=length == 256, keeps_sent=True, fp8_layers=0.75,
            )  # fmt: skip
            seen |= check(estimate(Setup(workload, layout, cluster)))
            seen |= check(estimate(Setup(workload, layout, parse_cluster("1x16xcpu"))))
    assert {"pipeline bubble": layout.pp > 1, "offload": name in OFFLOADED}.items() <= {
        part: part in seen for part in ("pipeline bubble", "offload")
    }.items()


def test_muon() -> None:
    config = {key: value for key, value in CONFIG.items() if "experts" not in key}
    updates = owner_updates(config | {"model_type": "llama"}, (), optimizer_of("muon"))
    for layout in (Layout(dp=16, zero_stage=3), Layout(dp=16, zero_stage=1)):
        workload = Workload(dense(), 64, "bf16", "deepspeed", updates=updates)
        check(estimate(Setup(workload, layout, parse_cluster("2x8xh100-80gb"))))
