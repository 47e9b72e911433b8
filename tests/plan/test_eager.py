"""Attention by plain products: what the planner says it keeps is what autograd keeps."""

import pytest

from tests.forked import run_ranks
from tests.plan.eager_worker import GROUPS, HEADS, LENGTH, kept_bytes
from tests.plan.making import TINY
from toolkit.models.families import model_spec
from toolkit.plan.cost.layer import eager_bytes
from toolkit.plan.cost.workload import Workload


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
