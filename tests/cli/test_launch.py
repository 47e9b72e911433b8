"""`dmt launch`: mistakes on its command line, and what it starts again without some devices."""

import os
import sys
from types import ModuleType

from tests.e2e.conftest import RECIPE
from tests.processes import ROOT
from toolkit.cli import entry, main
from toolkit.intake.load import load_recipe
from toolkit.launchers import launching as launch
from toolkit.run.assignment import decide, write


def test_a_restart_takes_the_gpus_that_work(tmp_path, monkeypatch, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    recipe = load_recipe(file, ["cluster.gpus_per_node=4", "cluster.gpu=h100-80gb"])
    planned = decide(recipe, tmp_path / "run")
    write(planned, ["dmt"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    # Asking GPUs needs GPUs: tests/launchers/test_restarts.py has the asking.
    monkeypatch.setattr(launch, "working_gpus", lambda _: ["4", "5", "6", "7"])
    assert launch._still_possible(planned, recipe, None, []) is planned
    monkeypatch.setattr(launch, "working_gpus", lambda _: ["4", "6", "7"])
    found = launch._still_possible(planned, recipe, None, [])
    assert found.plan.layout.world == 2
    assert found.plan.layout.global_batch == planned.plan.layout.global_batch
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6,7"
    assert "3 of 4 GPUs work" in capsys.readouterr().err
    assert len(launch._spec(found, None).rank_env) == 2


def test_a_spare_gpu_takes_the_place_of_a_dead_one(tmp_path, monkeypatch):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    recipe = load_recipe(file, ["cluster.gpus_per_node=2", "cluster.gpu=h100-80gb"])
    planned = decide(recipe, tmp_path / "run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr(launch, "working_gpus", lambda _: ["4", "6"])
    assert launch._still_possible(planned, recipe, None, []) is planned
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,6"


def test_processors_are_not_asked(tmp_path, monkeypatch):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    recipe = load_recipe(file)
    planned = decide(recipe, tmp_path / "run")
    monkeypatch.setattr(launch, "working_gpus", lambda _: [])
    assert launch._still_possible(planned, recipe, None, []) is planned


def test_an_empty_run_directory_is_one_error(capsys):
    """It meant the current directory."""
    assert main.main(["launch", "recipe.yaml", "--run-dir", ""]) == 2
    errors = capsys.readouterr().err
    assert "--run-dir" in errors
    assert "it is empty" in errors


def test_ctrl_c_while_importing_is_quiet(monkeypatch):
    def interrupted(_name: str) -> None:
        raise KeyboardInterrupt

    module = ModuleType("toolkit.cli.main")
    module.__getattr__ = interrupted
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert entry.main() == 130
    assert 'dmt = "toolkit.cli.entry:main"' in (ROOT / "pyproject.toml").read_text()
