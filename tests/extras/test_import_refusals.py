"""Checkpoints of torch.distributed.checkpoint that do not fit the recipe's model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.checkpoint.making import MODEL, write_recipe
from tests.models.small import filled
from toolkit.errors import CheckpointError
from toolkit.extras.imports import dcp
from toolkit.extras.imports.state import (
    RecipeModel,
    differences,
    recipe_model,
    shards_of,
)
from toolkit.intake.load import load_recipe

MOMENTS = {"exp_avg": 2, "exp_avg_sq": 3}
"""Of each weight, so many times its value."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RecipeModel:
    return recipe_model(load_recipe(write_recipe(tmp_path_factory.mktemp("recipe"))))


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {name: p.detach() for name, p in filled(MODEL).named_parameters()}


def write_dcp(
    folder: Path, weights: Mapping[str, Tensor], nested: bool, more: Mapping[str, Tensor]
) -> None:
    states = {
        name: {q: p * factor for q, factor in MOMENTS.items()} | {"step": torch.tensor(3.0)}
        for name, p in weights.items()
    }
    for key, value in more.items():
        name, _, quantity = key.rpartition(".")
        states[name][quantity] = value
    flat = {f"optimizer.state.{n}.{q}": v for n, one in states.items() for q, v in one.items()}
    whole = {"model": weights, "optim": {"state": states}} if nested else {**weights, **flat}
    save(whole, checkpoint_id=folder, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("nested", [True, False])
def test_no_tensor_of_dcp_is_dropped(
    nested: bool, model: RecipeModel, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """tests/e2e/test_import.py compares those of a real run."""
    write_dcp(tmp_path / "whole", weights, nested, {})
    assert len(shards_of(dcp.read(tmp_path / "whole", model), model)) == len(weights)
    for name, shape in (("lm_head", (320, 64)), ("model.layers.2.input_layernorm", (64,))):
        more = weights | {f"{name}.weight": torch.ones(shape)}
        write_dcp(tmp_path / name, more, nested, {})
        with pytest.raises(CheckpointError, match=f"it has {name}.weight, which"):
            shards_of(dcp.read(tmp_path / name, model), model)
    maximum = {"model.norm.weight.max_exp_avg_sq": torch.ones(64)}
    write_dcp(tmp_path / "amsgrad", weights, nested, maximum)
    with pytest.raises(CheckpointError, match=r"max_exp_avg_sq .* adamw does not keep"):
        shards_of(dcp.read(tmp_path / "amsgrad", model), model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [True, False])
def test_groups_of_dcp(flat: bool, model: RecipeModel, tmp_path: Path) -> None:
    trained = filled(MODEL)
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)

    def saved(name: str, **options: Any) -> Path:
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.25, eps=0.5, **options)
        optimizer.step()
        form = StateDictOptions(flatten_optimizer_state_dict=flat)
        weights, states = get_state_dict(trained, optimizer, options=form)
        save({"model": weights, "optim": states}, checkpoint_id=tmp_path / name, no_dist=True)
        return tmp_path / name

    state = dcp.read(saved("plain", weight_decay=0.5, betas=(0.5, 0.75)), model)
    assert len(state.groups) == (len(model.parameters) if flat else 1)
    told = "optimizer.weight_decay was 0.5, the recipe's 0.1 applies, and norms and biases have"
    betas, eps, decay = differences(state.groups, model.recipe)
    assert "betas was [0.5, 0.75]" in betas and "eps was 0.5" in eps and told in decay
    folder = saved("maximize", maximize=True)
    with pytest.raises(CheckpointError, match="is used with maximize"):
        shards_of(dcp.read(folder, model), model)
    trained.bfloat16()
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = dcp.read(saved("rounded"), model)
    assert any("bfloat16, without fp32" in note for note in state.notes)
