"""What ranks are started with, and plans that are made again for another number of them."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import HfApi

from tests.e2e.conftest import RECIPE
from toolkit.cli.main import main
from toolkit.errors import PlanError, RecipeError
from toolkit.intake.load import load_recipe
from toolkit.launchers.job import job_of
from toolkit.recipe.dump import dump_recipe
from toolkit.recipe.schema import Recipe
from toolkit.run.assignment import assign, decide, read_assignment, write


def recipe_on(folder: Path, gpus: int, *changes: str) -> Recipe:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE)
    return load_recipe(file, [f"cluster.gpus_per_node={gpus}", *changes])


def test_an_elastic_restart_with_other_ranks_plans_again(tmp_path, monkeypatch, capsys):
    write(decide(recipe_on(tmp_path, 4), tmp_path / "run"), ["dmt"])
    with pytest.raises(PlanError, match="the launcher started 2"):
        read_assignment(tmp_path / "run", 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    found = read_assignment(tmp_path / "run", 2)
    assert (found.recipe.cluster.nodes, found.recipe.cluster.gpus_per_node) == (2, 1)
    assert found.plan.layout.global_batch == 8
    assert "2 ranks instead of 4: planned again" in capsys.readouterr().err
    # The run directory has the new plan: a next start of as many ranks reads it.
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert read_assignment(tmp_path / "run", 2).plan == found.plan
    for damaged in ("5", "[]", '{"predicted": {"memory_gib": "much"}}'):
        (tmp_path / "run" / "plan.json").write_text(damaged)
        with pytest.raises(PlanError, match="is not a run directory"):
            read_assignment(tmp_path / "run", 2)


def test_a_restart_starts_from_the_checkpoint_that_was_chosen_first(tmp_path):
    """Also when the other run has saved more, or is gone, meanwhile."""
    first = tmp_path / "first"
    start = ("model.init=checkpoint", f"model.checkpoint={first}")
    with pytest.raises(RecipeError, match=r"model.checkpoint: found .*first does not exist"):
        decide(recipe_on(tmp_path, 2, *start), tmp_path / "run")
    chosen = f"{first}/checkpoints/step-00000020"
    (tmp_path / "run").mkdir()
    stated = recipe_on(tmp_path, 2, start[0], f"model.checkpoint={chosen}")
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(stated))
    found = decide(recipe_on(tmp_path, 2, *start), tmp_path / "run")
    assert found.recipe.model.checkpoint == chosen


def test_a_run_keeps_the_commit_of_an_unpinned_data_set(tmp_path, monkeypatch):
    """Otherwise it could not continue after any commit there, as to the data set's README."""
    data, newest = "data.train={kind: hf, path: org/texts}", ["a" * 40]
    answer = lambda *_, **__: SimpleNamespace(sha=newest[-1])  # noqa: E731
    monkeypatch.setattr(HfApi, "dataset_info", answer)
    first = decide(recipe_on(tmp_path, 2, data), tmp_path / "run")
    write(first, ["dmt"])
    newest.append("b" * 40)
    again = decide(recipe_on(tmp_path, 2, data), tmp_path / "run")
    other = decide(recipe_on(tmp_path, 2, data), tmp_path / "other")
    revisions = [one.recipe.data.train.revision for one in (first, again, other)]
    assert revisions == ["a" * 40, "a" * 40, "b" * 40]
    # A run of 0.1 has none, and the hub of the moment identifies its data.
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe_on(tmp_path, 2, data)))
    unpinned = decide(recipe_on(tmp_path, 2, data), tmp_path / "run")
    assert unpinned.recipe.data.train.revision is None


def test_ranks_that_plan_show_what_dmt_launch_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "one.txt").write_text("a document")
    recipe_on(tmp_path, 2)
    assert main(["launch", "recipe.yaml", "--dry-run"]) == 0
    plan = capsys.readouterr().err
    assert plan.startswith("layout ddp dp2")
    made = assign(Path("recipe.yaml"), [], None, ["torchrun"], 2)
    assert capsys.readouterr().err == f"{plan}run directory runs/e2e\n"
    # Where `dmt launch` hands a job over, it has shown the plan.
    job = job_of(made)
    job.recipe_file.parent.mkdir()
    job.recipe_file.write_text(job.recipe)
    assign(job.recipe_file, [], Path("runs/e2e"), ["torchrun"], 2)
    assert capsys.readouterr().err == "run directory runs/e2e\n"
