"""The same recipe under every way to start it: the same losses, a complete run directory."""

import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.exported import assert_export_reproduces_validation
from tests.e2e.product import (
    checkpoints,
    curve,
    events,
    run,
    settings,
    tool,
)
from tests.processes import ROOT
from toolkit.launchers.base import free_port

pytestmark = pytest.mark.slow

STEPS = {"training.steps": 6}
WORKER = ROOT / "launch" / "train.py"


def assert_same_start(run_dir: Path, reference: Path, relative: float = 1e-5) -> None:
    """The run's steps are the reference's first ones."""
    found, expected = curve(run_dir), curve(reference)
    assert found
    assert found == {
        step: pytest.approx(expected[step], rel=relative) for step in range(1, len(found) + 1)
    }


MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPI = ("--bind-to", "none", "-np", "2", sys.executable)


@pytest.mark.parametrize(
    ("start", "env"),
    [
        pytest.param(
            tool("torchrun", "--standalone", "--nproc-per-node", "2"),
            {},
            marks=pytest.mark.soak,  # as test_torchruns_own_restart starts it
        ),
        (tool("deepspeed", "--num_gpus", "2", "--master_port", str(free_port())), {}),
        (tool("accelerate", "launch", "--num_processes", "2", "--multi_gpu"), {}),
        pytest.param(
            ["mpirun.openmpi", *MPI], MPI_AS_ROOT, marks=pytest.mark.needs("openmpi-bin")
        ),
        pytest.param(
            ["mpirun.mpich", *MPI],
            {},
            marks=[pytest.mark.needs("mpich"), pytest.mark.soak],
        ),
    ],
    ids=["torchrun", "deepspeed", "accelerate", "openmpi", "mpich"],
)
def test_started_by_their_own_command(
    project: Project, ddp_run: Path, start: list[str], env: dict[str, str]
):
    """As docs/launchers.md shows; rank 0 shows what `dmt launch` shows."""
    name = f"direct-{Path(start[0]).name}"
    plan = project.launch(name, STEPS, "--dry-run").err
    argv = [*start, str(WORKER), str(project.recipe), "--run-dir", name, *settings(STEPS)]
    ended = run(argv, project.folder, env, code=0)
    assert_same_start(project.folder / name, ddp_run)
    assert checkpoints(project.folder / name) == [6]
    assert ended.err.count(f"{plan}run directory {name}\n") == 1, ended.err
    assert ended.err.count("\nready after ") == 1
    assert ended.err.count("\nstep time    ") == 1
    assert ended.err.count(f"\nexport       {name}/export\n") == 1


def test_a_single_process(project: Project, ddp_run: Path):
    changes = {**STEPS, "cluster.gpus_per_node": 1}
    argv = tool("python", WORKER, project.recipe, "--run-dir", "single", *settings(changes))
    run(argv, project.folder, code=0)
    assert_same_start(project.folder / "single", ddp_run)


def test_zero_2_trains_like_ddp(ddp_run: Path, zero_2_run: Path):
    assert_same_start(zero_2_run, ddp_run)


ENGINES = pytest.mark.parametrize(
    "engine", [pytest.param("ddp", marks=pytest.mark.quick), "zero_2"]
)


@ENGINES
def test_run_directory_is_complete(request, engine):
    run_dir = request.getfixturevalue(f"{engine}_run")
    files = {"recipe.yaml", "plan.json", "command.txt", "environment.json"}
    files |= {"metrics.jsonl", "events.jsonl", "logs/rank-0.log", "logs/rank-1.log"}
    files |= {"export/config.json", "export/model.safetensors", "export/tokenizer.json"}
    files |= {"deepspeed.json"} if engine == "zero_2" else set()
    assert {name for name in files if not (run_dir / name).is_file()} == set()
    assert sorted(curve(run_dir)) == list(range(1, 21))
    assert checkpoints(run_dir) == [20]
    assert not list(run_dir.rglob("*.tmp"))
    (end,) = events(run_dir, "end")
    assert (end["exit_code"], end["rank"], end["step"]) == (0, 0, 20)


@ENGINES
def test_export_reproduces_the_validation_loss(request, project: Project, engine):
    run_dir = request.getfixturevalue(f"{engine}_run")
    assert_export_reproduces_validation(project.folder / "data", run_dir)
