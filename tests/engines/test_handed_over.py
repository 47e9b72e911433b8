"""Settings of a DeepSpeed file without a key in the recipe: DeepSpeed gets them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.cases import Case, assert_curves, reference, run
from tests.plan.making import recipe
from toolkit.backend import BACKENDS, adopt_engine_config
from toolkit.plan.planner import plan_recipe
from toolkit.run.announce import ledger_of

HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
STATES = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def in_file(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    (folder / "own.json").write_text(json.dumps(settings))
    return {"config": str(folder / "own.json")}


@pytest.mark.slow
def test_a_second_copy_of_the_weights_changes_nothing(tmp_path: Path) -> None:
    case = Case("deepspeed", 1, stage=3, zero=in_file(tmp_path, HPZ))
    (result,) = run([replace(case, resume_in=str(tmp_path))], world=4).values()
    assert_curves(result, reference(case))


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_adam")
def test_states_in_bf16_follow_fp32_and_resume(tmp_path: Path) -> None:
    """Losses differ by at most 1e-3; a checkpoint has every bit of the states."""
    fp32 = Case("deepspeed", 2, stage=2, precision="bf16")
    own = replace(fp32, stage=3, offload="cpu", zero=in_file(tmp_path, STATES))
    resumed = replace(own, resume_in=str(tmp_path))
    found = run([own, resumed], world=2)
    losses = torch.tensor(found[own.name]["loss"])
    assert (losses / torch.tensor(reference(fp32)["loss"]) - 1).abs().max() < 1e-3
    assert_curves(found[resumed.name], found[own.name], tolerance=1e-12)


@pytest.mark.parametrize(
    ("settings", "what"),
    [(HPZ, ["planned memory"]), (STATES, ["AdamW", "moments"])],
)
def test_the_plan_says_what_it_does_not_count_or_what_is_rounded(
    tmp_path: Path, settings: dict[str, Any], what: list[str]
) -> None:
    wanted = adopt_engine_config(
        recipe(
            training__precision="bf16", cluster__gpu="h100-80gb", cluster__gpus_per_node=8,
            parallel__zero={"stage": 3, **in_file(tmp_path, settings)},
        )
    )  # fmt: skip
    plan = plan_recipe(wanted)
    config = BACKENDS[plan.engine].render(wanted, plan.layout)
    (section,) = settings
    assert config[section].items() >= settings[section].items()
    entries = {one.what for one in ledger_of(wanted, plan)}
    assert entries >= {*what}
