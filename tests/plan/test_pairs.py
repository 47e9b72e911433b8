"""What a recipe of pairs costs: all that twice as many sequences cost."""

from dataclasses import replace

import pytest

from tests.plan.making import recipe
from toolkit.layout import Layout, Pair
from toolkit.plan.cost.memory import peak_memory
from toolkit.plan.cost.time import step_time
from toolkit.plan.cost.workload import workload_of
from toolkit.plan.hardware.cluster import parse_cluster
from toolkit.plan.request import PlanRequest

H100 = parse_cluster("8x8xh100-80gb")
ENGINES = [Pair("deepspeed", "hf"), Pair("megatron", "megatron"), Pair("fsdp", "hf")]
LAYOUTS = [
    Layout(dp=64, zero_stage=3, micro_batch=2, gradient_accumulation=4),
    Layout(dp=16, tp=4, sequence_parallel=True, zero_stage=1, micro_batch=1),
    Layout(dp=8, tp=2, pp=2, micro_batch=1, gradient_accumulation=8, recompute="full"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("pair", ENGINES, ids=str)
def test_a_pair_costs_what_two_sequences_do(pair: Pair, layout: Layout) -> None:
    wanted = recipe(training__objective="dpo")
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
