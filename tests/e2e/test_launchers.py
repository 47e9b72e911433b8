"""The same recipe under every way to start it: the same losses, a complete run directory."""

import os
import signal
from pathlib import Path

import pytest

from tests import needs
from tests.e2e.conftest import Project
from tests.e2e.exported import assert_export_reproduces_validation
from tests.e2e.product import (
    assert_saved_and_stopped,
    checkpoints,
    curve,
    events,
    run,
    settings,
    started,
    steps_logged,
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


# `--launcher deepspeed` is in test_resume.py, with a stop and a resume; ray, slurm and several
# hosts are in files of their own.
@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("accelerate", marks=pytest.mark.soak)]
)
def test_dmt_launch(project: Project, ddp_run: Path, launcher: str):
    project.launch(launcher, STEPS, "--launcher", launcher)
    run_dir = project.folder / launcher
    assert_same_start(run_dir, ddp_run)
    assert checkpoints(run_dir) == [6]


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(
            ["torchrun", "--standalone", "--nproc-per-node", "2"],
            marks=pytest.mark.soak,  # as `dmt launch` and test_resume.py start it
        ),
        ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port())],
    ],
    ids=lambda start: start[0],
)
def test_started_directly(project: Project, ddp_run: Path, start):
    """Rank 0 shows what `dmt launch` shows."""
    run_dir = f"direct-{start[0]}"
    plan = project.launch(run_dir, STEPS, "--dry-run").err
    ended = run(
        tool(*start, WORKER, project.recipe, "--run-dir", run_dir, *settings(STEPS)),
        project.folder,
        code=0,
    )
    assert_same_start(project.folder / run_dir, ddp_run)
    assert ended.err.count(f"{plan}run directory {run_dir}\n") == 1, ended.err
    assert ended.err.count("\nready after ") == 1
    assert ended.err.count("\nstep time    ") == 1
    assert ended.err.count(f"\nexport       {run_dir}/export\n") == 1


@pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.soak)])
def test_mpirun_stops_saves_and_continues_with_more_ranks(
    project: Project, ddp_run: Path, mpi: str
):
    needs.require({"openmpi": "openmpi-bin"}.get(mpi, mpi))
    run_dir = project.folder / mpi
    env = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    start = ["--launcher", "mpi", "--set", f"launch.mpi.command=mpirun.{mpi}"]
    with started(
        project.command(mpi, {"training.steps": 100_000}, *start), project.folder, env
    ) as command:
        command.wait_for(lambda: steps_logged(run_dir) >= 3, "the third step")
        os.kill(command.process.pid, signal.SIGTERM)
        ended = command.end()
    assert_saved_and_stopped(ended, run_dir)
    steps = steps_logged(run_dir) + 3
    more = {"training.steps": steps, "cluster.gpus_per_node": 4}
    project.launch(mpi, more, *start, env=env)
    assert_same_start(run_dir, ddp_run)
    assert checkpoints(run_dir)[-1] == steps


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
