"""What DMT renders for a recipe states what the recipe states; one changed word is found."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.foreign.conftest import TINY, Planned
from tests.processes import ROOT
from toolkit.backend import BACKENDS
from toolkit.engines.deepspeed.config import OWNED
from toolkit.foreign import against, places_in

RECIPES = sorted((ROOT / "recipes").glob("*/*.yaml"))


def engine_config(planned: Planned) -> dict[str, Any]:
    return BACKENDS[planned.plan.engine].render(planned.recipe, planned.plan.layout)


def rendered(planned: Planned, folder: Path) -> Path | None:
    """The file that the recipe's own engine reads; None where it is not DeepSpeed."""
    if planned.plan.engine == "deepspeed":
        file = folder / "ds_config.json"
        file.write_text(json.dumps(engine_config(planned), indent=1))
        return file
    return None


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_agrees(path: Path, tmp_path: Path) -> None:
    planned = Planned.of(path)
    file = rendered(planned, tmp_path)
    if file is None:
        return
    report = planned.against(file)
    wrong = [row for row in report.compared if row.verdict != "agrees"]
    assert (wrong, report.source.unknown) == ([], [])
    # DeepSpeed's file has nothing of an optimizer that is not DeepSpeed's.
    least = 12 if planned.recipe.optimizer.name == "adamw" else 7
    assert len(report.compared) >= least


@pytest.mark.parametrize("recipe", ["tiny/llama-bytes", "llama/llama-3.1-8b-lora"])
@pytest.mark.parametrize("engine", ["deepspeed", "ddp", "fsdp"])
def test_accelerate_agrees(recipe: str, engine: str, tmp_path: Path) -> None:
    config = pytest.importorskip("toolkit.foreign.accelerate_file")
    overrides = (f"parallel.engine={engine}", "parallel.model=hf")
    planned = Planned.of(ROOT / f"recipes/{recipe}.yaml", *overrides)
    file = tmp_path / "accelerate.yaml"
    file.write_text(config.render(planned.recipe, planned.plan))
    report = planned.against(file)
    wrong = [row for row in report.compared if row.verdict not in ("agrees", "auto")]
    assert (wrong, report.source.unknown) == ([], [])
    assert len(report.compared) >= 4


OTHERWISE = {
    "train_batch_size": 999,
    "train_micro_batch_size_per_gpu": 99,
    "gradient_accumulation_steps": 77,
    "gradient_clipping": 0.5,
    "bf16.enabled": True,
    "fp16.enabled": True,
    "optimizer.type": "Lamb",
    "optimizer.params.lr": 1.0,
    "optimizer.params.betas": [0.1, 0.2],
    "optimizer.params.eps": 0.1,
    "optimizer.params.weight_decay": 0.7,
    "zero_optimization.stage": 1,
    "zero_optimization.offload_optimizer.device": "cpu",
    "zero_optimization.offload_optimizer.nvme_path": "/fast",
    "zero_optimization.offload_param.device": "nvme",
    "zero_optimization.offload_param.nvme_path": "/fast",
    "gradient_allreduce_op": "sum",
    "scheduler.params.warmup_num_steps": 21,
    "wandb.project": "another",
}


def test_every_setting_that_the_recipe_owns_is_tried() -> None:
    assert OWNED.keys() <= OTHERWISE.keys()


@pytest.mark.parametrize("key", OTHERWISE)
def test_each_changed_word_of_a_deepspeed_config_is_found(
    key: str, tiny: Planned, tmp_path: Path
) -> None:
    config = engine_config(tiny)
    *blocks, name = key.split(".")
    block = config
    for step in blocks:
        block = block.setdefault(step, {})
    block[name] = OTHERWISE[key]
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config, indent=1))
    (row,) = tiny.against(file).conflicts
    line = 1 + next(
        number
        for number, text in enumerate(file.read_text().splitlines())
        if f'"{blocks[-1] if blocks else name}"' in text
    )
    assert row.name == key
    assert row.winner == "recipe"
    assert int(row.place.rpartition(":")[2]) >= line
    assert row.key == OWNED.get(key, row.key).replace(
        "training.global_batch_size / (training.micro_batch_size · dp)", "gradient_accumulation"
    )


def test_the_recipes_own_file_is_refused(tmp_path: Path, tiny: Planned) -> None:
    config = engine_config(tiny) | {"train_batch_size": 999}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(config))
    zero = tiny.recipe.parallel.zero.model_copy(update={"config": str(file)})
    parallel = tiny.recipe.parallel.model_copy(update={"zero": zero})
    recipe = tiny.recipe.model_copy(update={"parallel": parallel})
    (row,) = Planned(recipe, tiny.plan).against(file).conflicts
    assert (row.name, row.winner) == ("train_batch_size", "refused")


def test_auto_takes_the_recipes_value(tiny: Planned) -> None:
    report = tiny.against(ROOT / "ds_configs/zero2.json")
    assert report.agrees
    verdicts = {row.name: row.verdict for row in report.compared}
    assert verdicts["train_batch_size"] == "auto"
    assert verdicts["zero_optimization.stage"] == "agrees"


def test_the_place_of_the_recipes_value_is_told(tmp_path: Path, tiny: Planned) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(engine_config(tiny)))
    (report,) = against(str(file), tiny.recipe, tiny.plan, places_in(TINY))
    origins = {row.key: row.origin for row in report.compared}
    lines = TINY.read_text().splitlines()
    stated = 1 + next(n for n, line in enumerate(lines) if "precision:" in line)
    assert origins["training.precision"] == f"{TINY}:{stated}"
    assert origins["optimizer.eps"] == "default"
    assert origins["parallel.zero.stage"] == "planned"
