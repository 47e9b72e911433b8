"""DeepSpeed's universal checkpoints: what is not AdamW's, odd numbers, and raw folders."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.making import MODEL, write_recipe
from tests.dmt import Dmt
from tests.models.small import filled
from toolkit.errors import CheckpointError
from toolkit.extras.imports import deepspeed
from toolkit.extras.imports.state import RecipeModel, differences, recipe_model, shards_of
from toolkit.intake.load import load_recipe

STATES = "mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RecipeModel:
    return recipe_model(load_recipe(write_recipe(tmp_path_factory.mktemp("recipe"))))


def universal(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """A checkpoint as ds_to_universal writes it."""
    parameters = dict(filled(MODEL).named_parameters())
    shapes = {name: one.shape for name, one in parameters.items()}
    saved: dict[str, Any] = {
        "optimizer": None, "module": {}, "buffer_names": [], "shared_params": {},
        "param_shapes": [shapes], "global_steps": 2, "skipped_steps": 0, "global_samples": 8,
        "ds_config": {},
    }  # fmt: skip
    for name, parameter in parameters.items():
        inner = folder / "zero" / name
        inner.mkdir(parents=True, exist_ok=True)
        value = parameter.detach()
        for quantity, factor in {"fp32": 1, "exp_avg": 2, "exp_avg_sq": 3}.items():
            torch.save({"param": value * factor}, inner / f"{quantity}.pt")
        torch.save(torch.tensor(2.0), inner / "step.pt")
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    torch.save({"param_groups": [group]}, folder / "zero" / "optimizer_state.pt")
    torch.save(saved | (changes or {}), folder / STATES)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ds_config": {"optimizer": {"type": "Lamb"}}}, "its optimizer was Lamb:"),
        (
            {"ds_config": {"optimizer": {
                "type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}
            }}},
            "its optimizer was Adam with adam_w_mode: false",
        ),
        ({"global_samples": "x"}, "global_samples is 'x'"),
        ({"global_samples": -5}, "global_samples is -5"),
        ({"global_samples": 20.5}, "global_samples is 20.5"),
        ({"global_steps": float("nan")}, "global_steps is nan"),
    ],
)  # fmt: skip
def test_odd_counters_and_optimizers(
    changes: dict[str, Any], message: str, model: RecipeModel, tmp_path: Path
) -> None:
    folder = universal(tmp_path)
    shards_of(deepspeed.read(folder, model), model)
    with pytest.raises(CheckpointError, match=message):
        deepspeed.read(universal(folder, changes), model)


def test_states_that_adamw_does_not_keep(model: RecipeModel, tmp_path: Path) -> None:
    folder = universal(tmp_path)
    torch.save({"param": torch.ones(64)}, folder / "zero/model.norm.weight/max_exp_avg_sq.pt")
    with pytest.raises(CheckpointError, match=r"max_exp_avg_sq .* adamw does not keep"):
        shards_of(deepspeed.read(folder, model), model)


def test_differences_are_named(model: RecipeModel, tmp_path: Path) -> None:
    notes = [*differences(deepspeed.read(universal(tmp_path), model).groups, model.recipe)]
    assert notes == [
        "optimizer.betas was [0.9, 0.999], the recipe's [0.9, 0.95] applies",
        "optimizer.weight_decay was 0.1, the recipe's 0.1 applies, "
        "and norms and biases have none",
    ]


def test_a_raw_folder_names_the_script_that_makes_it_universal(
    tmp_path: Path, dmt: Dmt
) -> None:
    source = tmp_path / "global_step2"
    source.mkdir()
    (source / STATES).touch()
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    (tmp_path / "a.txt").write_text("text " * 200)
    printed = dmt("checkpoint", "import", recipe, source, "--run-dir", run, code=2).err
    command = "python -m deepspeed.checkpoint.ds_to_universal --input_folder"
    assert command in printed and "--inject_missing_state" in printed
    assert not run.exists()


def test_a_failed_import_leaves_no_run(tmp_path: Path, dmt: Dmt) -> None:
    recipe, run = write_recipe(tmp_path), tmp_path / "run"
    (tmp_path / "a.txt").write_text("text " * 200)
    source = universal(tmp_path / "saved")
    words = ("checkpoint", "import", recipe, source, "--run-dir", run)
    optimizer = source / "zero" / "optimizer_state.pt"
    groups = torch.load(optimizer)
    for damaged in ({"eps": None}, "x"):
        torch.save({"param_groups": [damaged]}, optimizer)
        assert "does not hold what DeepSpeed universal writes" in dmt(*words, code=2).err
    torch.save(groups, optimizer)
    nan = source / "zero" / "model.layers.0.mlp.up_proj.weight" / "exp_avg.pt"
    torch.save({"param": torch.load(nan)["param"] * float("nan")}, nan)
    printed = dmt(*words, code=2)
    assert "exp_avg" in printed.err and "layers.0" in printed.err
    assert not [path for path in run.rglob("*") if path.is_file()]
