"""The run directory: complete, without secrets, and never shared by two different runs."""

import errno
import json
import logging
import os
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import LlamaConfig

from toolkit.checkpoint.export_adapters import saved_lora
from toolkit.errors import RecipeError
from toolkit.intake.load import load_recipe
from toolkit.recipe.schema import AdapterSection, Recipe
from toolkit.run.directory import RunDirectory
from toolkit.run.rank_log import setup_rank_logging
from toolkit.train.checkpoints import RunCheckpoints

CANARY = "canary-7d1f2c9b"
COMMAND = ["dmt", "launch", "a recipe.yaml"]


def recipe(**changes: object) -> Recipe:
    sections: dict[str, object] = {
        "name": "tiny",
        "model": {"config": {"model_type": "llama", "hidden_size": 64}},
        "data": {"train": {"kind": "hf", "path": "org/set"}},
        "training": {"steps": 10, "sequence_length": 32, "global_batch_size": 8},
        "optimizer": {"learning_rate": 1e-8},
    }
    for dotted, value in changes.items():
        section, _, key = dotted.partition("__")
        sections[section] = {**sections.get(section, {}), key: value} if key else value
    return Recipe.model_validate(sections)


def create(
    path: Path, a_recipe: Recipe, config: dict[str, object] | None = None
) -> RunDirectory:
    plan = {"engine": "deepspeed"}
    return RunDirectory.create(path, a_recipe, plan, COMMAND, config or {})


def test_everything_is_written(tmp_path):
    run = create(tmp_path / "runs" / "tiny", recipe(), {"zero": 2})
    assert load_recipe(run.recipe) == recipe()
    assert "decay_steps" in run.recipe.read_text(), "defaults are written out"
    assert json.loads(run.plan.read_text()) == {"engine": "deepspeed"}
    assert json.loads(run.engine_config("deepspeed").read_text()) == {"zero": 2}
    assert shlex.split(run.command.read_text()) == COMMAND
    environment = json.loads(run.environment.read_text())
    assert environment["packages"]["torch"]
    assert environment["packages"]["transformer-engine"] is None
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert run.rank_log(3) == run.path / "logs" / "rank-3.log"
    assert not list(run.path.rglob("*.tmp"))


def test_a_full_disk_and_a_folder_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "checkpoints")
    with pytest.raises(RecipeError, match=r"checkpoints \(Permission denied\)"):
        create(tmp_path, recipe())
    monkeypatch.undo()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(RecipeError, match=r"plan.json \(No space left on device\)"):
        create(tmp_path, recipe())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training__steps": 20},
        {"training": {"epochs": 2.0, "sequence_length": 32, "global_batch_size": 8}},
        {"training__micro_batch_size": 2},
        {"logging__every_steps": 1},
        {"checkpoint__every_steps": 5},
        {"cluster__gpus_per_node": 2},
        {"parallel__engine": "ddp"},
        {"launch__launcher": "slurm"},
    ],
)
def test_the_same_run_continues(tmp_path, changes):
    create(tmp_path, recipe())
    run = create(tmp_path, recipe(**changes))
    assert load_recipe(run.recipe) == recipe(**changes), "the new values count"
    assert len(run.command.read_text().splitlines()) == 2


def test_a_run_of_a_release_with_other_settings_continues(tmp_path):
    run = create(tmp_path, recipe())
    text = run.recipe.read_text()
    assert "\n  special_tokens: text" in text
    run.recipe.write_text(text.replace("\n  special_tokens: text", "\n  cache: /removed"))
    create(tmp_path, recipe())


def test_another_run_is_refused_naming_every_difference(tmp_path):
    create(tmp_path, recipe())
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    other = recipe(
        training__seed=7, training__steps=99, model__init="pretrained", schedule__name="wsd"
    )
    with pytest.raises(RecipeError) as error:
        create(tmp_path, other)
    found = {problem.key: (problem.found, problem.allowed) for problem in error.value.problems}
    assert set(found) == {"training.seed", "model.init", "schedule.name"}
    assert found["training.seed"][0] == "7"
    assert found["training.seed"][1].startswith("1234,")
    assert "--run-dir OTHER" in str(error.value)
    assert {file: file.read_bytes() for file in before} == before, "nothing was touched"


@pytest.mark.parametrize(
    ("kinds", "bound"), [("launch", True), ("launch end", False), ("launch start end", True)]
)
def test_a_run_that_never_began_may_begin_with_another_recipe(tmp_path, kinds, bound):
    create(tmp_path, recipe())
    with (tmp_path / "events.jsonl").open("a") as events:
        events.writelines(json.dumps({"kind": kind}) + "\n" for kind in kinds.split())
    with pytest.raises(RecipeError) if bound else nullcontext():
        create(tmp_path, recipe(training__seed=7))


@pytest.mark.parametrize("text", ["", "- a\n", "a: [", "\x00"])
def test_a_directory_of_something_else_is_refused(tmp_path, text):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match="not a recipe"):
        create(tmp_path, recipe())


def test_a_path_that_cannot_be_a_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="a folder that can be written"):
        create(tmp_path / "file" / "run", recipe())


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


@pytest.mark.usefixtures("root_logger")
def test_rank_logs(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MY_API_KEY", CANARY)
    run = RunDirectory(tmp_path)
    setup_rank_logging(run, 0)
    for _ in range(3):
        logging.getLogger("library").warning("slow: %s", CANARY)
    try:
        raise ValueError(CANARY)
    except ValueError:
        logging.getLogger("library").info("details", exc_info=True)
    log = run.rank_log(0).read_text()
    assert log.count("WARNING library: slow: ***") == 3
    assert "ValueError: ***" in log
    assert capsys.readouterr().err == "WARNING: slow: ***\n", "once, and no details"


@pytest.mark.usefixtures("root_logger")
def test_checkpoints_with_settings_that_were_removed() -> None:
    """At their defaults: a longer run continues, adapters are read."""
    stored = recipe(schedule={"name": "plateau", "plateau": {}}).model_dump(mode="json")
    stored["schedule"]["plateau"] |= {"threshold": 1e-4, "cooldown": 0}
    stored["training"] |= {"steps": 4, "tokens": None, "epochs": None}
    longer = SimpleNamespace(assignment=SimpleNamespace(recipe=recipe()), _warn=print)
    manifest: Any = SimpleNamespace(recipe=stored, step=2, adapter=None)
    RunCheckpoints._report_bend(longer, manifest, 6)  # type: ignore[arg-type]
    adapter = AdapterSection(rank=4, alpha=8).model_dump(mode="json")
    manifest.adapter = adapter | {"init": "kaiming", "folder": None}
    assert saved_lora(manifest, LlamaConfig()) is not None


def test_other_ranks_do_not_write_to_the_console(tmp_path, capsys):
    setup_rank_logging(RunDirectory(tmp_path), 1)
    logging.getLogger("library").warning("slow")
    assert capsys.readouterr().err == ""
    assert "slow" in RunDirectory(tmp_path).rank_log(1).read_text()
