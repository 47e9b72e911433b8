"""ZeRO++: a second copy of the weights within groups of ranks, and quantized messages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engines.cases import assert_curves, run
from tests.engines.parity_worker import Case, each_case, reference
from tests.features.zero_plus.zero_plus_worker import look
from tests.forked import call_ranks
from tests.plan.making import LLAMA_8B, recipe
from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.engines.deepspeed.ops import required_ops
from toolkit.errors import Problem, RecipeError
from toolkit.hardware.cluster import parse_cluster
from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.models.hub import model_config
from toolkit.plan.cost.collectives import network
from toolkit.plan.cost.efficiency import DEFAULT
from toolkit.plan.cost.memory import peak_memory
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import Workload
from toolkit.plan.planner import plan_recipe
from toolkit.run.announce import ledger_of

SHARDED = {
    "hpz": 2,
    "extra": {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    },
}
"""The model is small: its parameters would stay whole on every rank between passes."""
CASE = Case("deepspeed", 1, stage=3, zero=SHARDED)
ON_GPUS = {
    "training__precision": "fp16", "cluster__gpu": "h100-80gb", "cluster__nodes": 2,
    "cluster__gpus_per_node": 4, "training__global_batch_size": 8,
}  # fmt: skip


@pytest.mark.slow
def test_later_passes_gather_within_the_group() -> None:
    """All but the first of each step; the second copy is spread over as few ranks."""
    plain = replace(CASE, zero={**SHARDED, "hpz": 1})
    found = call_ranks(each_case, 4, look, [CASE, plain])[0]
    one, other = found[CASE.name], found[plain.name]
    print(one, other)
    assert one["micro_batches"] == 2
    assert other["gathered"].keys() == {4}
    # Two passes of two micro batches; what a pass uses twice it gathers twice.
    assert one["gathered"][4] == pytest.approx(other["gathered"][4] / 4, rel=0.1)
    assert one["gathered"][2] == pytest.approx(other["gathered"][4] * 3 / 4, rel=0.1)
    assert one["second"] == pytest.approx(one["whole"] / 2, rel=0.01)
    assert other["second"] == 0


@pytest.mark.slow
def test_a_resumed_run_is_a_plain_loop(tmp_path: Path) -> None:
    (result,) = run([replace(CASE, resume_in=str(tmp_path))], world=4).values()
    assert_curves(result, reference())


def rendered(zero: dict[str, Any], **changes: Any) -> Any:
    wanted = adopt_engine_config(recipe(**changes, parallel__zero=zero))
    plan = plan_recipe(wanted)
    return plan, BACKENDS[plan.engine].render(wanted, plan.layout)


def refused(zero: dict[str, Any], **changes: Any) -> Problem:
    with pytest.raises(RecipeError) as caught:
        rendered(zero, **changes)
    (problem,) = caught.value.problems
    return problem


def test_the_recipe_decides_and_deepspeed_is_told() -> None:
    plan, config = rendered({"hpz": 4, "quantized_weights": True}, **ON_GPUS)
    zero = config["zero_optimization"]
    assert (plan.engine, plan.layout.zero_stage, plan.layout.hpz) == ("deepspeed", 3, 4)
    assert zero["zero_hpz_partition_size"] == 4 and zero["zero_quantized_weights"]
    assert "zero_quantized_gradients" not in zero
    assert required_ops(config) == ("quantizer",)
    assert any(reason.startswith("hpz 4: asked for") for reason in plan.reasons)
    plan, config = rendered({"stage": 3}, **ON_GPUS)
    assert plan.layout.hpz == 1 and "zero_hpz" not in str(config)
    assert required_ops(config) == ()


def test_a_file_is_taken_over_and_may_not_disagree(tmp_path: Path) -> None:
    preset = {"config": "zeropp"}
    plan, config = rendered(preset, **ON_GPUS)
    assert plan.layout.hpz == 8 and config["zero_optimization"]["zero_quantized_weights"]
    # A preset has defaults, a file of one's own decisions.
    plan, config = rendered({**preset, "hpz": 4, "quantized_weights": False}, **ON_GPUS)
    zero = config["zero_optimization"]
    assert (zero["zero_hpz_partition_size"], zero["zero_quantized_weights"]) == (4, False)
    own = tmp_path / "own.json"
    own.write_text('{"zero_optimization": {"zero_hpz_partition_size": 8}}')
    assert rendered({"config": str(own)}, **ON_GPUS)[0].layout.hpz == 8
    problem = refused({"config": str(own), "hpz": 4}, **ON_GPUS)
    assert problem.key == "zero_optimization.zero_hpz_partition_size"
    assert "parallel.zero.hpz" in problem.allowed
    own.write_text('{"zero_optimization": {"zero_hpz_partition_size": true}}')
    assert refused({"config": str(own)}, **ON_GPUS).allowed == "an integer ≥ 1"


@pytest.mark.parametrize(
    ("zero", "changes", "key", "allowed"),
    [
        ({"hpz": 2, "stage": 2}, {}, "hpz", "below stage 3"),
        ({"hpz": 3}, {}, "hpz", "1 or 2 or 4 or 8"),
        ({"hpz": 2, "offload_parameters": "cpu"}, {}, "hpz", "offloaded parameters"),
        ({"hpz": 2}, {"parallel__engine": "fsdp"}, "hpz", "null for engine fsdp"),
        ({"hpz": 2}, {"parallel__model": "megatron"}, "hpz", "with model megatron"),
        ({"quantized_weights": True}, {"cluster__gpu": "cpu", "training__precision": "bf16"},
         "quantized_weights", "a CUDA kernel"),
        ({"quantized_weights": True}, {"training__precision": "fp32"},
         "quantized_weights", "reads no fp32"),
        ({"quantized_gradients": True}, {"training__precision": "bf16"},
         "quantized_gradients", "reads its bits as fp16"),
        ({"quantized_gradients": True}, {"cluster__nodes": 1},
         "quantized_gradients", "several nodes"),
    ],
)  # fmt: skip
def test_what_is_refused(
    zero: dict[str, Any], changes: dict[str, Any], key: str, allowed: str
) -> None:
    problem = refused(zero, **{**ON_GPUS, **changes})
    assert problem.key == f"parallel.zero.{key}" and allowed in problem.allowed


def test_the_ledger_names_what_is_rounded() -> None:
    zero = {"hpz": 4, "quantized_weights": True, "quantized_gradients": True}
    wanted = adopt_engine_config(recipe(**ON_GPUS, parallel__zero=zero))
    found = {one.what: one for one in ledger_of(wanted, plan_recipe(wanted))}
    assert found["second copy of the weights"].kind == "exact"
    assert found["gathered weights"].why == "in quantized blocks, from 8 data-parallel ranks"
    assert found["gradient reduction"].why.endswith("ranks in quantized blocks")


def test_a_preset_quantizes_what_it_gathers() -> None:
    sixteen = {**ON_GPUS, "training__precision": "bf16", "cluster__nodes": 1}
    zero = {"config": "zeropp", "stage": 3, "hpz": 4}
    wanted = adopt_engine_config(recipe(**sixteen, parallel__zero=zero))
    found = {one.what: one.why for one in ledger_of(wanted, plan_recipe(wanted))}
    assert "gradient reduction" not in found
    assert found["gathered weights"] == "in quantized blocks, from 4 data-parallel ranks"


def test_memory_and_time_by_hand() -> None:
    spec = model_spec(model_config(LLAMA_8B.model))
    cluster = parse_cluster("4x8xh100-80gb")
    train = Workload(spec, 8192, "bf16", "deepspeed")
    plain = Layout(dp=32, zero_stage=3, micro_batch=4, gradient_accumulation=3)
    copied = replace(plain, hpz=8)
    more = peak_memory(train, copied).allocated - peak_memory(train, plain).allocated
    assert more == pytest.approx(2 * spec.parameters.total / 8)
    links = network(cluster, DEFAULT)
    layer = 2 * spec.parameters.total / spec.layers
    far, near = (spec.layers * links.group(n, 1).all_gather_s(layer) for n in (32, 8))
    assert near < far
    shown = [step_time(train, one, cluster).communication for one in (plain, copied)]
    sent = [one["data_gather"] + one["data_reduce"] for one in shown]
    slowed = DEFAULT[train.cost.overlap]
    assert sent[0] - sent[1] == pytest.approx(slowed * 5 * (far - near), rel=0.05)
