"""Which attention kernel is tried first, and that an engine tries it."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.making import TINY, recipe
from toolkit.engines.build import _try_first
from toolkit.errors import RecipeError
from toolkit.plan.plan import Plan
from toolkit.plan.planner import explore, plan_recipe, settled

HOPPER = {"cluster__gpu": "h100-80gb", "training__precision": "bf16"}
ISOLATED = {"data__isolate_documents": True}
LLAMA4 = {"model_type": "llama4_text", "num_hidden_layers": 4}
"""Its chunks have the default length."""
SPREAD = {"parallel__context": 2, "cluster__gpus_per_node": 2}
GENERIC = TINY | {"model_type": "starcoder2"}
GEMMA2 = TINY | {"model_type": "gemma2", "head_dim": 32}


def planned(**changes: Any) -> Plan:
    return plan_recipe(recipe(**changes))


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "cudnn"),
        ({"cluster__gpu": "a100-80gb"}, "sdpa"),
        ({"cluster__gpu": "cpu"}, "sdpa"),
        ({"cluster__gpu": "h200"}, "cudnn"),
        ({"training__precision": "fp32"}, "sdpa"),
        (ISOLATED, "varlen"),
        (ISOLATED | {"cluster__gpu": "v100-32gb", "training__precision": "fp16"}, "sdpa"),
        (ISOLATED | {"model__config": LLAMA4}, "sdpa"),
        (ISOLATED | {"model__config": GENERIC}, "sdpa"),
        (ISOLATED | {"cluster__gpu": "cpu"}, "varlen"),
        (ISOLATED | {"training__precision": "fp32"}, "sdpa"),
        (ISOLATED | {"training__deterministic": True}, "sdpa"),
        (ISOLATED | {"model__config": TINY | {"attention_dropout": 0.1}}, "sdpa"),
        ({"model__config": TINY | {"head_dim": 256}}, "sdpa"),
        ({"model__config": GEMMA2}, "eager"),
        ({"kernels__attention": "eager", "cluster__gpu": "cpu"}, "eager"),
        ({"kernels__attention": "sdpa"}, "sdpa"),
        ({"kernels__attention": "flash", "cluster__gpu": "a100-80gb"}, "flash"),
        (SPREAD, "varlen"),
        (SPREAD | {"model__config": GEMMA2, "cluster__gpu": "cpu"}, "varlen"),
    ],
)
def test_cudnn_is_tried_first_where_it_is_faster(changes: dict[str, Any], kernel: str) -> None:
    plan = planned(**HOPPER | changes)
    assert plan.attention_kernel == kernel
    assert plan.to_dict()["attention_kernel"] == kernel
    assert any(f"attention {kernel}: " in why for why in plan.reasons)


def test_eager_attention_is_planned_and_refuses_no_layout() -> None:
    long = HOPPER | {"training__sequence_length": 8192, "kernels__compile": "none"}
    for engine in ("fsdp", "megatron"):
        fused, eager = (
            explore(recipe(**long, parallel__engine=engine, kernels__attention=kernel))
            for kernel in ("auto", "eager")
        )
        workload = eager.best.setup.workload
        assert workload.attention == "eager" and not workload.cudnn
        assert eager.best.memory_gib > fused.best.memory_gib
        assert eager.best.step_s > fused.best.step_s


CUDNN = {"kernels__attention": "cudnn"}
OLD = {"cluster__gpu": "v100-32gb", "training__precision": "fp16"}


@pytest.mark.parametrize(
    ("changes", "key", "why"),
    [
        (CUDNN | {"cluster__gpu": "cpu"}, "kernels.attention", "cluster.gpu cpu has none"),
        (CUDNN | {"training__precision": "fp32"}, "kernels.attention", "precision is fp32"),
        (CUDNN | ISOLATED, "kernels.attention", "no mask that isolates"),
        (CUDNN | {"model__config": GEMMA2}, "kernels.attention", "gemma2's attention is comp"),
        # Context parallel needs the kernel for lengths.
        (SPREAD | {"training__precision": "fp32"}, "parallel.context", "computes in 16 bits"),
        (SPREAD | {"model__config": GEMMA2}, "parallel.context", "computed by plain products"),
        (SPREAD | {"training__deterministic": True}, "parallel.context", "not deterministic"),
        (SPREAD | OLD, "parallel.context", "has none"),
        (SPREAD | {"kernels__attention": "sdpa"}, "kernels.attention", "auto or varlen"),
    ],
)
def test_a_kernel_that_would_never_run_is_refused(
    changes: dict[str, Any], key: str, why: str
) -> None:
    with pytest.raises(RecipeError, match=key) as refused:
        planned(**HOPPER | {"cluster__gpus_per_node": 4} | changes)
    assert why in str(refused.value)


def test_a_mask_that_isolates_documents_costs_memory_and_time() -> None:
    """Where no kernel takes lengths."""
    old = HOPPER | OLD | {"training__sequence_length": 8192}
    plain, isolated = (explore(recipe(**old, **more)).best for more in ({}, ISOLATED))
    assert isolated.memory_gib > plain.memory_gib and isolated.step_s > plain.step_s


def test_cudnn_is_planned_faster() -> None:
    long = HOPPER | {"training__sequence_length": 32768}
    first, own = (
        explore(recipe(**long, kernels__attention=kernel)).best for kernel in ("cudnn", "sdpa")
    )
    assert first.setup.workload.cudnn and not own.setup.workload.cudnn
    assert first.step_s < 0.9 * own.step_s


@pytest.mark.parametrize("kernel", ["eager", "cudnn"])
def test_it_is_planned_again(kernel: str) -> None:
    wanted = recipe(**HOPPER, kernels__attention=kernel)
    plan = plan_recipe(wanted)
    assert plan.attention == ("eager" if kernel == "eager" else "sdpa")
    assert plan_recipe(settled(wanted, plan)).attention_kernel == kernel


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
