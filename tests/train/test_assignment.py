"""Plans made again for fewer devices: the same global batch, or a clear refusal."""

from pathlib import Path

import pytest

from tests.e2e.conftest import RECIPE
from toolkit.errors import PlanError, RunFailed
from toolkit.recipe.load import load_recipe
from toolkit.recipe.schema import Recipe
from toolkit.train.assignment import decide, decide_for_fewer, read_assignment, write


def recipe_on(folder: Path, gpus: int, *changes: str) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE)
    return load_recipe(file, [f"cluster.gpus_per_node={gpus}", *changes])


@pytest.mark.parametrize(("left", "used"), [(3, 2), (2, 2), (1, 1)])
def test_fewer_devices_keep_the_global_batch(tmp_path, left, used):
    found = decide_for_fewer(recipe_on(tmp_path, 4), tmp_path / "run", None, left)
    assert found.recipe.cluster.gpus_per_node == used  # 8 sequences cannot be cut by 3
    assert found.plan.layout.world == used
    assert found.plan.layout.global_batch == 8
    assert not (tmp_path / "run").exists()


def test_no_layout_is_left(tmp_path):
    tensor = ("parallel.engine=megatron", "parallel.tensor=4", "training.micro_batch_size=8")
    with pytest.raises(RunFailed, match="3 of 4 devices work, and no layout") as error:
        decide_for_fewer(recipe_on(tmp_path, 4, *tensor), None, None, 3)
    assert error.value.exit_code == 4


def test_an_elastic_restart_with_other_ranks_plans_again(tmp_path, monkeypatch, capsys):
    write(decide(recipe_on(tmp_path, 4), tmp_path / "run"), ["dmt"])
    with pytest.raises(PlanError, match="the launcher started 2"):
        read_assignment(tmp_path / "run", 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    found = read_assignment(tmp_path / "run", 2)
    assert (found.recipe.cluster.nodes, found.recipe.cluster.gpus_per_node) == (2, 1)
    assert found.plan.layout.global_batch == 8
    assert "2 ranks in place of 4: planned again" in capsys.readouterr().err
    # The run directory has the new plan: a next start of as many ranks reads it.
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert read_assignment(tmp_path / "run", 2).plan == found.plan
