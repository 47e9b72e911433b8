"""AdamW's states in bf16, by the real DeepSpeed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.cases import assert_curves
from tests.engines.parity_worker import Case, each_case, reference
from tests.features.bf16_states.bf16_states_worker import states
from tests.forked import call_ranks
from tests.plan.making import LLAMA_8B, recipe
from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.errors import RecipeError
from toolkit.layout import Layout
from toolkit.models.families import model_spec
from toolkit.models.hub import model_config
from toolkit.plan.cost.memory import host_bytes, peak_memory
from toolkit.plan.cost.workload import Workload
from toolkit.plan.planner import plan_recipe
from toolkit.rehearse.rehearsal import Options, prepare
from toolkit.run.announce import ledger_of

BF16 = {"bf16_optimizer_states": True}
ON_GPUS = {
    "training__precision": "bf16", "cluster__gpu": "h100-80gb", "cluster__gpus_per_node": 8,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_states_in_bf16_follow_fp32_and_resume(tmp_path: Path) -> None:
    """Against the fp32 loop, losses differ by at most twice as much as with fp32 states; a
    checkpoint has every bit of them."""
    fp32 = Case("deepspeed", 2, stage=2, precision="bf16")
    sharded = replace(fp32, zero=BF16)
    offloaded = replace(sharded, stage=3, offload="cpu")
    resumed = replace(offloaded, resume_in=str(tmp_path))
    cases = [fp32, sharded, offloaded, resumed]
    found = call_ranks(each_case, 2, states, cases)[0]
    expected = torch.tensor(reference()["loss"])
    losses = [torch.tensor(found[case.name]["loss"]) for case in cases]
    differences = [(one / expected - 1).abs().max().item() for one in losses]
    assert max(differences[1:]) < max(1e-3, 2 * differences[0])
    assert [found[case.name]["dtypes"] for case in cases[:3]] == [
        {"torch.float32"}, {"torch.bfloat16"}, {"torch.bfloat16"},
    ]  # fmt: skip
    assert_curves(found[resumed.name], found[offloaded.name], tolerance=1e-12)


def rendered(zero: dict[str, Any], **changes: Any) -> Any:
    wanted = adopt_engine_config(recipe(**{**ON_GPUS, **changes}, parallel__zero=zero))
    plan = plan_recipe(wanted)
    return plan, BACKENDS[plan.engine].render(wanted, plan.layout)


def test_the_recipe_or_the_file_decides(tmp_path: Path) -> None:
    plan, config = rendered({**BF16, "stage": 1})
    assert plan.layout.offload_optimizer == "cpu"  # what else is possible in stage 1
    assert config["bf16"].items() >= {
        "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True,
    }.items()  # fmt: skip
    assert "bf16_optimizer_states" not in str(rendered({"stage": 2})[1])
    own = tmp_path / "own.json"
    both = '"bf16_master_weights_and_grads": true, "bf16_optimizer_states": true'
    own.write_text(f'{{"bf16": {{{both}}}}}')
    assert rendered({"config": str(own), "stage": 2})[1]["bf16"]["bf16_optimizer_states"]
    own.write_text(f'{{"bf16": {{{both.partition(",")[0]}}}}}')
    with pytest.raises(RecipeError, match=r"parallel\.zero\.bf16_optimizer_states"):
        rendered({"config": str(own), "stage": 2})


@pytest.mark.parametrize(
    ("zero", "changes", "found"),
    [
        ({"stage": 1, "offload_optimizer": "none"}, {}, "stage: 1"),
        ({"stage": 0}, {}, "stage: 0"),
        ({"offload_optimizer": "nvme", "nvme_path": "/scratch"}, {}, "nvme"),
        ({}, {"training__precision": "fp16"}, "precision: fp16"),
        ({}, {"optimizer__name": "muon"}, "optimizer.name: muon"),
        ({}, {"parallel__engine": "fsdp"}, "for engine fsdp"),
    ],
)
def test_what_is_refused(zero: dict[str, Any], changes: dict[str, Any], found: str) -> None:
    with pytest.raises(RecipeError) as caught:
        rendered({**BF16, **zero}, **changes)
    (problem,) = caught.value.problems
    assert problem.key == "parallel.zero.bf16_optimizer_states" and found in problem.found


def test_rehearsals_are_without() -> None:
    wanted = recipe(**ON_GPUS, parallel__zero=BF16)
    first = prepare(wanted, Options(steps=1, processes=2)).layouts[0]
    assert first.parallel.zero.bf16_optimizer_states is None


def test_ledger_and_memory() -> None:
    wanted = adopt_engine_config(recipe(**ON_GPUS, parallel__zero=BF16))
    (entry,) = (one for one in ledger_of(wanted, plan_recipe(wanted)) if one.what == "bf16")
    assert entry.kind == "approximated" and "updated in fp32" not in entry.why
    spec = model_spec(model_config(LLAMA_8B.model))
    train = Workload(spec, 8192, "bf16", "deepspeed")
    small = replace(train, optimizer_bytes=6.0)
    layout = Layout(dp=8, zero_stage=2)
    saved = peak_memory(train, layout).optimizer - peak_memory(small, layout).optimizer
    assert saved == pytest.approx(6 * spec.parameters.total / 8)
    away = replace(layout, offload_optimizer="cpu")
    saved = host_bytes(train, away, 8) - host_bytes(small, away, 8)
    assert saved == pytest.approx(6 * spec.parameters.total)
