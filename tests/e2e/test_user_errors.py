"""A mistake of the user, through the real commands: one message, exit code 2, soon."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import Ended, events, run, settings, tool
from tests.processes import ROOT

pytestmark = pytest.mark.slow

WORKER = ROOT / "launch" / "train.py"


def assert_one_message(ended: Ended, message: str, fix: str, code: int = 2) -> None:
    assert ended.code == code, ended.err
    assert ended.err.count(message) == 1, ended.err
    assert fix in ended.err
    assert "Traceback" not in ended.err
    assert "--- the end of" not in ended.err, "no log next to a message that says it all"


@pytest.mark.parametrize(
    ("change", "message", "fix"),
    [
        ({"training.step": 3}, "training.step\n      found", "did you mean `steps`?"),
        ({"model.config.vocab_size": 200}, "has 257 tokens", "`model.config.vocab_size`"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_seen_before_anything_is_started(project: Project, change, message, fix):
    ended = project.launch("never", change, code=2)
    assert_one_message(ended, message, fix)
    assert not (project.folder / "never").exists()


def test_seen_by_both_workers(project: Project, tmp_path: Path):
    """Validation data is counted when it is built."""
    short = tmp_path / "short.md"
    short.write_text("a")
    source = f"{{kind: text, files: [{short}]}}"
    change = {"data.validation": source, "data.validation_fraction": 0.0}
    ended = project.launch(str(tmp_path / "run"), change, code=2)
    assert_one_message(ended, "the validation data of `short.md` has", "use more data")
    (end,) = events(tmp_path / "run", "end")
    assert (end["exit_code"], end["rank"]) == (2, 0)


def test_layers_that_no_compiler_can_compile(project: Project):
    changes, env = {"kernels.compile": "layers"}, {"CXX": "/no/such/compiler"}
    ended = project.launch("no-compiler", changes, env=env, code=3)
    message = "kernels.compile: there is no C++ compiler ('/no/such/compiler'"
    assert_one_message(ended, message, "CXX", code=3)
    assert not (project.folder / "no-compiler").exists()


def test_a_run_for_gpus_without_one(project: Project):
    ended = project.launch("no-gpu", {"cluster.gpu": "h100-80gb"}, code=3)
    assert_one_message(ended, "torch finds no GPU", "--set cluster.gpu=cpu", code=3)


@pytest.mark.parametrize(
    ("change", "message", "fix"),
    [
        ({"training.global_batch_size": 4096}, "which make", "use more data"),
        ({"data.train.files": '["none/*.txt"]'}, "no file matches", "correct the path"),
    ],
    ids=["too little", "missing"],
)
def test_seen_by_a_worker_without_a_launcher(project: Project, change, message, fix):
    changes = settings({"cluster.gpus_per_node": 1, **change})
    run_dir = f"refused-{next(iter(change))}"
    argv = tool("python", WORKER, project.recipe, "--run-dir", run_dir, *changes)
    assert_one_message(run(argv, project.folder), message, fix)


def test_a_launcher_that_starts_other_ranks_than_planned(project: Project):
    argv = tool("torchrun", "--standalone", "--nproc-per-node", "2", WORKER, project.recipe)
    changes = settings({"cluster.gpus_per_node": 4})
    ended = run([*argv, "--run-dir", "four", *changes], project.folder)
    assert ended.code != 0
    message = "1 node(s) with 4 process(es) each, the launcher started 2"
    assert ended.err.count(message) == 1, ended.err
    assert "worker.py" not in ended.err, "no traceback but torchrun's own"
    assert not (project.folder / "four").exists()
