"""What `dmt plan --explain` prints of each number follows from its own symbols."""

from math import log, sqrt

import pytest

from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.plan.cost.workload import Workload
from toolkit.plan.estimate import derivations, estimate, memory_parts
from toolkit.plan.hardware.cluster import parse_cluster
from toolkit.text.units import GIB

CONFIG = {
    "model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 3584,
    "vocab_size": 32000, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "num_local_experts": 6, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2, pp=4, vpp=2, sequence_parallel=True, zero_stage=1, recompute=1),
        Layout(dp=8, tp=2, ep=2, zero_stage=1, experts="grouped", gradient_accumulation=2),
    ],
    ids=str,
)
def test_each_part_has_a_formula(layout: Layout) -> None:
    train = Workload(model_spec(CONFIG), 2048, "bf16", "megatron", model="megatron")
    found = estimate(train, layout, parse_cluster("2x8xh100-80gb"))
    derived = derivations(found)
    for rows in derived.values():
        for one in rows.values():
            value = eval(one["formula"], {"max": max, "sqrt": sqrt, "log": log}, one["symbols"])
            assert value == pytest.approx(one["value"]), one
    shown = {one["part"]: one["value"] / GIB for one in derived["memory"].values()}
    memory = {part: size for part, size in memory_parts(found.memory).items() if size}
    assert {part: shown[part] for part in memory} == memory
    shown = {one["part"]: one["value"] for one in derived["time"].values()}
    assert all(shown[part] == s for part, s in found.time.parts.items() if s)
    assert derived["utilization"]["utilization"]["value"] == found.time.utilization()
