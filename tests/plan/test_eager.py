"""Attention by plain products: what the planner says it keeps is what autograd keeps."""

import pytest

from tests.forked import run_ranks
from tests.plan.eager_worker import GROUPS, HEADS, LENGTH, kept_bytes
from tests.plan.making import RECIPES, TINY, recipe
from toolkit.intake.load import load_recipe
from toolkit.models.families import model_spec
from toolkit.plan.cost.layer import eager_bytes
from toolkit.plan.cost.workload import Workload, workload_of
from toolkit.plan.planner import explore


def test_what_scores_keep() -> None:
    for (family, model, precision), kept in run_ranks(kept_bytes, 1)[0].items():
        spec = model_spec(TINY | {"model_type": family, "num_key_value_heads": GROUPS})
        workload = Workload(
            spec, LENGTH, precision, "fsdp", model=model, attention="eager",
            fused_elementwise=False,
        )  # fmt: skip
        planned = eager_bytes(workload, "kept") * HEADS * LENGTH**2
        sinks = 1.5 / LENGTH
        assert kept == pytest.approx(planned, rel=sinks), (family, model, precision)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
def test_a_shipped_model_is_planned_so(name: str) -> None:
    found = explore(load_recipe(RECIPES / f"gpt-oss/{name}-pretrain.yaml"))
    workload = workload_of(found.job, found.best.pair)
    assert workload.attention == "eager" and workload.spec.scores == "sinks"


def test_memory_and_time_know_it() -> None:
    """Of gemma2, the same model but for its scores and logits."""
    settings = {
        "cluster__gpu": "h100-80gb", "training__precision": "bf16", "parallel__engine": "fsdp",
        "training__sequence_length": 4096, "training__micro_batch_size": 1,
        "kernels__compile": "none", "parallel__recompute": "none",
    }  # fmt: skip
    config = TINY | {"model_type": "gemma2", "head_dim": 16, "max_position_embeddings": 4096}
    found = explore(recipe(model__config=config, **settings))
    workload = workload_of(found.job, found.best.pair)
    assert workload.attention == "eager" and workload.spec.scores == "capped"
    plain = explore(recipe(model__config=TINY | {"max_position_embeddings": 4096}, **settings))
    scores = 8 * workload.spec.heads * workload.spec.layers * 4096**2 / 2**30
    assert found.best.memory_gib - plain.best.memory_gib > 0.99 * scores
    assert found.best.step_s > 2 * plain.best.step_s
