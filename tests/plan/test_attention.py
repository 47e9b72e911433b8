"""Which attention kernel is tried first, and that an engine tries it."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.making import TINY, recipe
from toolkit.engines.setup import _try_first
from toolkit.errors import RecipeError
from toolkit.plan.cost.workload import Workload
from toolkit.plan.ledger import ledger
from toolkit.plan.planner import Plan, explore, plan_recipe, settled

HOPPER = {"cluster__gpu": "h100-80gb", "training__precision": "bf16"}
GEMMA2 = TINY | {"model_type": "gemma2", "head_dim": 32}


def planned(**changes: Any) -> Plan:
    return plan_recipe(recipe(**changes))


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "cudnn"),
        ({"cluster__gpu": "a100-80gb"}, "sdpa"),
        ({"cluster__gpu": "b200"}, "sdpa"),
        ({"cluster__gpu": "cpu"}, "sdpa"),
        ({"cluster__gpu": {"like": "h200", "memory_gib": 100}}, "cudnn"),
        ({"training__precision": "fp32"}, "sdpa"),
        ({"data__isolate_documents": True}, "sdpa"),
        ({"model__config": TINY | {"head_dim": 256}}, "sdpa"),
        ({"model__config": GEMMA2}, "sdpa"),
        ({"kernels__attention": "sdpa"}, "sdpa"),
        ({"kernels__attention": "flash", "cluster__gpu": "a100-80gb"}, "flash"),
    ],
)
def test_cudnn_is_tried_first_where_it_is_faster(changes: dict[str, Any], kernel: str) -> None:
    plan = planned(**HOPPER | changes)
    assert plan.attention_kernel == kernel
    assert plan.to_dict()["attention_kernel"] == kernel
    assert any(f"attention {kernel}: " in why for why in plan.reasons) == (kernel != "sdpa")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cluster__gpu": "cpu"}, "cluster.gpu cpu has none"),
        ({"training__precision": "fp32"}, "training.precision is fp32"),
        ({"data__isolate_documents": True}, "no mask that isolates"),
        ({"model__config": GEMMA2}, "gemma2's attention is computed by plain products"),
    ],
)
def test_a_kernel_that_would_never_run_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=r"kernels\.attention") as refused:
        planned(**HOPPER | {"kernels__attention": "cudnn"} | changes)
    assert why in str(refused.value)


def test_the_planner_knows_its_speed() -> None:
    long = HOPPER | {"training__sequence_length": 32768}
    first, own = (
        explore(recipe(**long, kernels__attention=kernel)) for kernel in ("cudnn", "sdpa")
    )

    def workload(found: Any) -> Workload:
        return found.job.workload(found.best.pair)  # type: ignore[no-any-return]

    assert workload(first).cudnn and not workload(own).cudnn
    assert first.best.step_s < 0.9 * own.best.step_s


def test_it_is_in_the_ledger_and_planned_again() -> None:
    wanted = recipe(**HOPPER)
    plan = plan_recipe(wanted)
    spec = explore(wanted).job.spec
    (entry,) = [one for one in ledger(wanted, plan, spec) if one.what == "attention"]
    assert "cudnn's kernel first" in entry.why
    assert plan_recipe(settled(wanted, plan)).attention_kernel == "cudnn"


@pytest.mark.parametrize(("kernel", "number"), [("cudnn", 3), ("flash", 1)])
def test_an_engine_tries_it_first(kernel: Any, number: int) -> None:
    """In every one of its forward passes, and nobody else's; torch numbers its kernels."""
    order = torch._C._get_sdp_priority_order

    class Engine(nn.Module):
        def train_step(self) -> list[int]:
            return order()

        evaluate = sequence_log_probs = train_step

    engine, before = Engine(), order()
    _try_first(kernel, engine)  # type: ignore[arg-type]
    for method in (engine.train_step, engine.evaluate, engine.sequence_log_probs):
        assert method()[0] == number
        assert sorted(method()) == sorted(before), "all others after it"
    assert order() == before
