"""The rendered DeepSpeed config: complete, equal to the recipe, and what DeepSpeed reads.

`DMT_UPDATE_GOLDEN=1 pytest tests/engines/test_deepspeed_config.py` rewrites the golden files.
"""

import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.forked import run_ranks
from tests.plan.making import recipe
from toolkit.engines.deepspeed.config import (
    PRESETS,
    adopted,
    preset_for,
    preset_path,
    render,
)
from toolkit.engines.deepspeed.keys import ABSENT, OWNED, REQUIRED
from toolkit.errors import Problem, RecipeError
from toolkit.layout import Layout
from toolkit.recipe.schema import Recipe
from toolkit.text.dotted import put

GOLDEN = Path(__file__).parent.parent / "golden" / "deepspeed"
OPTIMIZER = {"learning_rate": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def wanted(
    layout: Layout, precision: str = "bf16", optimizer: dict[str, Any] = OPTIMIZER, **zero: Any
) -> tuple[Recipe, Layout]:
    """What is rendered."""
    settings = {f"optimizer__{key}": value for key, value in optimizer.items()}
    return recipe(**settings, training__precision=precision, parallel__zero=zero), layout


CASES: dict[str, tuple[Recipe, Layout]] = {
    "zero0-fp32": wanted(Layout(dp=2, micro_batch=4), "fp32"),
    "zero1-bf16": wanted(Layout(dp=8, zero_stage=1, micro_batch=2, gradient_accumulation=4)),
    "zero1-cpu": wanted(Layout(dp=8, zero_stage=1, offload_optimizer="cpu")),
    "zero2-fp16-unclipped": wanted(
        Layout(dp=4, zero_stage=2, micro_batch=3), "fp16", OPTIMIZER | {"clip_grad_norm": None}
    ),
    "zero2-cpu": wanted(Layout(dp=4, zero_stage=2, offload_optimizer="cpu")),
    "zero3-bf16": wanted(Layout(dp=64, zero_stage=3)),
    "zero3-parameters-cpu": wanted(Layout(dp=2, zero_stage=3, offload_parameters="cpu")),
    "zero3-cpu": wanted(
        Layout(dp=2, zero_stage=3, offload_optimizer="cpu", offload_parameters="cpu"), "fp32"
    ),
    "zero3-nvme": wanted(
        Layout(dp=2, zero_stage=3, offload_optimizer="nvme", offload_parameters="nvme"),
        nvme_path="/nvme",
    ),
    "zeropp": wanted(Layout(dp=16, zero_stage=3), config="zeropp"),
}
LAYOUT = Layout(dp=2, zero_stage=2, micro_batch=2, gradient_accumulation=3)


def own_file(tmp_path: Path, content: dict[str, Any] | str) -> str:
    path = tmp_path / "my.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return str(path)


def problems(config: str, layout: Layout = LAYOUT, **settings: Any) -> tuple[Problem, ...]:
    with pytest.raises(RecipeError) as caught:
        render(*wanted(layout, config=config, **settings))
    return caught.value.problems


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    text = json.dumps(render(*CASES[name]), indent=2) + "\n"
    golden = GOLDEN / f"{name}.json"
    if "DMT_UPDATE_GOLDEN" in os.environ:
        golden.write_text(text)
    assert text == golden.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == {*CASES}


def _as_read(rendered: dict[str, tuple[dict[str, Any], int]]) -> dict[str, list[object]]:
    """What the real DeepSpeedConfig makes of configs for so many ranks."""
    from deepspeed.runtime import config

    found = {}
    for name, (settings, ranks) in rendered.items():
        group = {"get_world_size": lambda *_, ranks=ranks: ranks, "get_rank": lambda *_: 0}
        with patch.multiple(config.dist, **group):
            read = config.DeepSpeedConfig(settings)
        zero = read.zero_config
        offloads = [zero.offload_optimizer, zero.offload_param]
        found[name] = [
            read.train_batch_size, read.gradient_clipping, zero.stage,
            read.float16_config.loss_scale, read.optimizer_name, read.optimizer_params["lr"],
            *(str(one.device) if one else "none" for one in offloads),
            zero.zero_hpz_partition_size, zero.zero_quantized_weights,
        ]  # fmt: skip
    return found


def test_deepspeed_reads_what_the_recipe_says() -> None:
    rendered = {name: (render(*one), one[1].dp) for name, one in CASES.items()}
    (read,) = run_ranks(_as_read, 1, rendered)
    for name, (given, layout) in CASES.items():
        plus = given.parallel.zero.config == "zeropp"
        assert read[name] == [
            layout.global_batch, given.optimizer.clip_grad_norm or 0.0, layout.zero_stage, 0,
            "adamw", 3e-4, layout.offload_optimizer, layout.offload_parameters,
            8 if plus else 1, plus,
        ], name  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_leave_everything_of_the_recipe_open(name: str) -> None:
    preset = json.loads(preset_path(name).read_text())
    owned = ["train_batch_size", "train_micro_batch_size_per_gpu"]
    owned += ["gradient_accumulation_steps", "gradient_clipping"]
    assert all(preset[key] == "auto" for key in owned)
    assert preset["bf16"]["enabled"] == preset["fp16"]["enabled"] == "auto"
    assert "optimizer" not in preset and "scheduler" not in preset


def test_every_stage_and_offload_has_a_preset_that_agrees() -> None:
    places = ("none", "cpu", "nvme")
    for stage, optimizer, parameters in itertools.product(range(4), places, places):
        layout = Layout(
            zero_stage=stage,  # type: ignore[arg-type]
            offload_optimizer=optimizer,  # type: ignore[arg-type]
            offload_parameters=parameters,  # type: ignore[arg-type]
        )
        config: Any = render(*wanted(layout, nvme_path="/nvme"))
        zero = config["zero_optimization"]
        assert zero["stage"] == stage
        for block, place in (("offload_optimizer", optimizer), ("offload_param", parameters)):
            assert zero.get(block, {}).get("device", "none") == place
        assert "auto" not in json.dumps(config).replace("auto_cast", "")
        assert preset_for(layout) in PRESETS


def test_a_value_that_disagrees_names_both_places(tmp_path: Path) -> None:
    """Regression for "ds gas=8 vs hf gas=8"."""
    config = own_file(
        tmp_path, '{\n "gradient_accumulation_steps": 8,\n "gradient_clipping": 0.5\n}'
    )
    accumulation, clipping = problems(config)
    assert (accumulation.file, accumulation.line) == (config, 2)
    assert accumulation.key == "gradient_accumulation_steps"
    assert accumulation.found == "8"
    assert accumulation.allowed.startswith("3, as the recipe says (training.global_batch_size")
    assert (clipping.line, clipping.found) == (3, "0.5")
    assert "1.0, as the recipe says (optimizer.clip_grad_norm)" in clipping.allowed


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ({"train_batch_size": 13}, "train_batch_size"),
        ({"bf16": {"enabled": False}}, "bf16.enabled"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}}, "optimizer.type"),
        ({"optimizer": {"params": {"lr": 10**400}}}, "optimizer.params.lr"),
        ({"optimizer": {"params": {"lr": "3e-4"}}}, "optimizer.params.lr"),
        ({"optimizer": {"params": {"betas": [0.9]}}}, "optimizer.params.betas"),
        ({"optimizer": {"params": {"max_grad_norm": 1}}}, "optimizer.params.max_grad_norm"),
        (
            {"zero_optimization": {"zero_quantized_gradients": True}},
            "zero_optimization.zero_quantized_gradients",
        ),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 3}},
            "zero_optimization.zero_hpz_partition_size",
        ),
        ({"scheduler": None}, "scheduler"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation"),
        ({"elasticity": {"enabled": True}}, "elasticity"),
        ({"zero_optimization": {"reduce_bucket": 1}}, "zero_optimization.reduce_bucket"),
        ({"zero_optimization": {"reduce_bucket_size": "auto"}}, None),
        ({"aio": {"queue_deph": 4}}, "aio.queue_deph"),
        ({"data_types": {"grad_accumulation": "fp32"}}, "data_types.grad_accumulation"),
        ({"bf16": True}, "bf16"),
        ({"optimizer": ["AdamW"]}, "optimizer"),
        ({"wall_clock_breakdown": "auto"}, "wall_clock_breakdown"),
    ],
)
def test_each_mistake_is_one_problem(
    tmp_path: Path, content: dict[str, Any], key: str | None
) -> None:
    found = problems(own_file(tmp_path, content))
    assert [problem.key for problem in found] == [key or "zero_optimization.reduce_bucket_size"]
    assert found[0].line > 0 and found[0].fix


RULED = [key for key in (*OWNED, *REQUIRED, *ABSENT) if not key.endswith("nvme_path")]
"""Without offload to NVMe, its folder is not read."""


@pytest.mark.parametrize("key", RULED)
def test_each_rule_of_a_key_is_kept(tmp_path: Path, key: str) -> None:
    content: dict[str, Any] = {}
    put(content, key, "wrong")
    (problem,) = problems(own_file(tmp_path, content))
    assert problem.key == key and problem.line > 0 and problem.fix


def test_what_deepspeed_has_removed_is_named(tmp_path: Path) -> None:
    """Compression of messages that older releases had, and what has taken its place."""
    content = {
        "optimizer": {"type": "OneBitAdam"},
        "zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}},
    }
    optimizer, loco = problems(own_file(tmp_path, content))
    assert "no 1-bit optimizers: write adamw" in optimizer.fix
    assert loco.fix == "delete it: DeepSpeed has removed it, and refuses it"


def test_several_mistakes_come_in_file_order(tmp_path: Path) -> None:
    mistakes = {
        "scheduler": {}, "gradient_cliping": 1.0, "bf16": {"enabled": False},
        "aio": {"queue_deph": 4},
    }  # fmt: skip
    found = problems(own_file(tmp_path, mistakes))
    assert [problem.line for problem in found] == [2, 3, 5, 8]
    assert found[1].fix == "did you mean `gradient_clipping`?"
    assert found[3].fix == "did you mean `queue_depth`?"


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"gradient_clipping": 1, "optimizer": {"type": "adamw", "params": {"lr": 0.0003}}},
        {"optimizer": None, "zero_optimization": {"stage": "auto", "offload_param": None}},
        {"zero_optimization": {"offload_param": {"device": "none", "nvme_path": "auto"}}},
        {"data_types": {"keep_in_fp32_modules": "auto"}},
    ],
)
def test_an_own_file_that_agrees_is_filled(tmp_path: Path, content: dict[str, Any]) -> None:
    config: Any = render(*wanted(LAYOUT, config=own_file(tmp_path, content)))
    assert config["train_batch_size"] == 12
    assert config["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert config["optimizer"]["params"]["lr"] == 3e-4
    assert config["zero_optimization"]["stage"] == 2
    assert config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["steps_per_print"] == 1_000_000_000


def test_what_the_file_says_about_its_own_matters_stays(tmp_path: Path) -> None:
    content = {
        "zero_optimization": {"reduce_bucket_size": 7, "overlap_comm": False},
        "steps_per_print": 5,
        "wall_clock_breakdown": True,
        "optimizer": {"params": {"torch_adam": False}},
    }
    config: Any = render(*wanted(LAYOUT, config=own_file(tmp_path, content)))
    assert config["zero_optimization"] == {
        "reduce_bucket_size": 7,
        "overlap_comm": False,
        "stage": 2,
    }
    assert config["steps_per_print"] == 5
    assert config["wall_clock_breakdown"]
    assert config["optimizer"]["params"]["torch_adam"] is False
    assert "fused" not in config["optimizer"]["params"], "an argument of PyTorch's AdamW only"


def test_a_preset_of_another_stage_is_refused() -> None:
    (problem,) = problems("zero3")
    assert problem.key == "zero_optimization.stage"
    assert problem.file == str(preset_path("zero3"))
    assert problem.found == "3" and problem.allowed.startswith("2, as the recipe says")


def test_unknown_preset_and_missing_file(tmp_path: Path) -> None:
    (problem,) = problems("zero2_ofload")
    assert problem.key == "parallel.zero.config"
    assert problem.fix == "did you mean `zero2_offload`?"
    (problem,) = problems(str(tmp_path / "none.json"))
    assert problem.key == "parallel.zero.config" and "JSON file of your own" in problem.allowed


def test_nvme_needs_a_folder_from_the_recipe_or_the_file(tmp_path: Path) -> None:
    layout = Layout(zero_stage=3, offload_optimizer="nvme")
    (problem,) = problems("zero3", layout)
    assert problem.key == "parallel.zero.nvme_path"
    block = {"device": "nvme", "nvme_path": "/disk"}
    config = own_file(tmp_path, {"zero_optimization": {"offload_optimizer": block}})
    rendered: Any = render(*wanted(layout, config=config))
    assert rendered["zero_optimization"]["offload_optimizer"] == block
    (problem,) = problems(config, layout, nvme_path="/other")
    assert problem.key == "zero_optimization.offload_optimizer.nvme_path"


def test_stage_and_offload_of_a_file(tmp_path: Path) -> None:
    zero = "parallel.zero."
    both = {f"{zero}offload_optimizer": "nvme", f"{zero}offload_parameters": "nvme"}
    assert adopted("zero3_nvme") == {f"{zero}stage": 3, **both}
    assert adopted("zero2_offload") == {f"{zero}stage": 2, f"{zero}offload_optimizer": "cpu"}
    assert adopted("zero0") == {f"{zero}stage": 0}
    assert adopted(own_file(tmp_path, {"zero_optimization": {"stage": "auto"}})) == {}
    for stage in (4, "2", 2.0, True):
        with pytest.raises(RecipeError, match="allowed: 0, 1, 2 or 3"):
            adopted(own_file(tmp_path, {"zero_optimization": {"stage": stage}}))
    block = {"offload_param": {"device": "disk"}}
    with pytest.raises(RecipeError, match="none, cpu or nvme"):
        adopted(own_file(tmp_path, {"zero_optimization": block}))


@pytest.mark.parametrize("setting", [{"initial_scale_power": 12}, {"loss_scale": 128}])
def test_the_first_loss_scale_of_fp16_is_the_plans(
    tmp_path: Path, setting: dict[str, int]
) -> None:
    own = own_file(tmp_path, {"fp16": {"enabled": "auto", **setting}})
    (problem,) = problems(own, precision="fp16")
    assert problem.key == f"fp16.{next(iter(setting))}"
    rendered: Any = render(*wanted(LAYOUT, config=own))
    assert rendered["fp16"].items() >= setting.items(), "not used, so not judged"


def test_muon_is_not_in_the_json(tmp_path: Path) -> None:
    """DMT hands its own optimizer over; a block of the file would be ignored."""
    muon = Layout(dp=2, zero_stage=2), "bf16", {"name": "muon", "learning_rate": 1.0}
    assert "optimizer" not in render(*wanted(*muon))
    own = own_file(tmp_path, {"optimizer": {"type": "auto"}})
    with pytest.raises(RecipeError) as caught:
        render(*wanted(*muon, config=own))
    (problem,) = caught.value.problems
    assert problem.key == "optimizer" and "set optimizer.name to adamw" in problem.fix
