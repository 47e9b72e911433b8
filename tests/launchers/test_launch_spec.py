"""What launchers would start, and what they refuse."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit
from toolkit.errors import PlanError
from toolkit.launchers import LOCAL, base
from toolkit.launchers.base import Job, starter
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.slurm import SlurmStarter
from toolkit.recipe.schema import (
    ClusterSection,
    ElasticSection,
    LaunchSection,
    SlurmSection,
)

RUN = Path("/runs/a run")
CPU = ClusterSection(gpus_per_node=2)
GPU = ClusterSection(gpus_per_node=2, gpu="h100-80gb")
WORKER = ("-m", "toolkit.train", "/runs/a run")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in (*base.RENDEZVOUS_VARIABLES, "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def test_local_starts_one_process_per_rank(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("GROUP_RANK", "7")
    spec = LocalStarter().spec(Job(RUN, CPU))
    assert spec.argv == (sys.executable, "-u", *WORKER)
    for rank in range(2):
        env = spec.process_env(rank)
        assert (env["RANK"], env["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("2", "2")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert "GROUP_RANK" not in env
    assert spec.process_env(0)["MASTER_PORT"] == spec.process_env(1)["MASTER_PORT"]


@pytest.mark.parametrize("name", ["local", "ray"])
def test_the_working_directory_is_not_on_the_path(name, monkeypatch, tmp_path):
    """A folder `toolkit/` there is not ours; only a checkout that is not installed needs it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toolkit").mkdir()
    (tmp_path / "toolkit" / "__init__.py").write_text("raise SystemExit('a stranger')")
    job = Job(RUN, CPU)
    env = starter(name).spec(job).process_env(0)
    assert env["PYTHONSAFEPATH"] == "1"
    if name == "local":
        command = [sys.executable, "-m", "toolkit.text.units"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        bare = {key: value for key, value in env.items() if key != "PYTHONSAFEPATH"}
        assert subprocess.run(command, env=bare, capture_output=True, check=False).returncode
    monkeypatch.chdir(Path(toolkit.__file__).parents[1])
    assert "PYTHONSAFEPATH" not in starter(name).spec(job).process_env(0)


def test_several_machines_are_refused_with_a_way_out():
    with pytest.raises(
        PlanError, match=r"nodes is 2\n  fix: (.|\n)*HOST:29400; or cluster\.nodes: 1"
    ):
        LocalStarter().spec(Job(RUN, ClusterSection(nodes=2)))


def test_machines_meet_at_the_rendezvous_and_plan_on_rank_0():
    elastic = ElasticSection(min_nodes=1, max_nodes=4)
    launch = LaunchSection(rendezvous="node-1:29400", elastic=elastic, max_restarts=3)
    two = ClusterSection(nodes=2, gpus_per_node=4)
    spec = LocalStarter().spec(Job(RUN, two, launch, name="tiny", recipe="name: tiny\n"))
    assert spec.meeting == base.Meeting("node-1:29400", "tiny", 3, 1, 4, True)
    recipe = RUN / "launch" / "recipe.yaml"
    assert spec.argv[-4:] == ("toolkit.train", str(recipe), "--run-dir", str(RUN))
    assert spec.files == {recipe: "name: tiny\n"}
    assert [*spec.rank_env] == [{"LOCAL_RANK": str(rank)} for rank in range(4)]
    assert not LOCAL.supervises(two.nodes)


def test_threads_are_divided_unless_set(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    assert base.worker_env(Job(RUN, ClusterSection()))["OMP_NUM_THREADS"] == str(cores)
    assert (
        base.worker_env(Job(RUN, ClusterSection(gpus_per_node=10 * cores)))["OMP_NUM_THREADS"]
        == "1"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in base.worker_env(Job(RUN, CPU))


def test_printable_is_a_shell_command_without_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "canary-7d1f2c9b")
    spec = base.LaunchSpec(
        argv=("python", "train it.py", "canary-7d1f2c9b"),
        run_dir=RUN,
        env={"A": "1 2"},
        rank_env=({"RANK": "0"}, {"RANK": "1"}),
    )
    first, second = spec.printable().split(" &\n")
    assert shlex.split(first) == ["A=1 2", "RANK=0", "python", "train it.py", "***"]
    assert shlex.split(second)[1] == "RANK=1"


def test_a_recipe_for_cpus_sees_no_gpu(monkeypatch):
    """A machine may have GPUs, and fewer of them than the recipe has ranks."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert base.worker_env(Job(RUN, CPU))["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in base.worker_env(Job(RUN, GPU))


def test_other_machines_get_the_settings_of_this_one(monkeypatch):
    sent = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "NVTE_FUSED_ATTN": "1",
        "LD_LIBRARY_PATH": "/opt/nccl/lib",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "UCX_TLS": "rc",
        "MLFLOW_TRACKING_URI": "http://here",
    }
    kept = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_HOME": "/here", "WANDB_API_KEY": "x", "PWD": "/"}
    for name, value in (sent | kept).items():
        monkeypatch.setenv(name, value)
    found = base.settings_here()
    assert sent.items() <= found.items()
    assert not kept.keys() & found.keys()


def test_the_long_recipe_is_only_named():
    spec = SlurmStarter().spec(Job(RUN, GPU, LaunchSection(), recipe="name: long"))
    recipe, script = spec.files
    printed = spec.printable()
    assert f"# {recipe}: the resolved recipe" in printed and "name: long" not in printed
    assert f"# {script}\n#!/bin/bash" in printed


def test_options_of_sbatch_replace_ours() -> None:
    launch = LaunchSection(slurm=SlurmSection(options=("--signal=B:USR1@900", "--no-requeue")))
    (*_, script) = SlurmStarter().spec(Job(RUN, GPU, launch)).files.values()
    assert script.count("--signal=") == 1 and "@900" in script
    assert "#SBATCH --requeue" not in script and "scontrol requeue" not in script


def test_an_elastic_job_of_slurm_outlives_a_node():
    changing = ElasticSection(min_nodes=1, max_nodes=4)
    asked = SlurmSection(options=("--partition=gpus", "--time=1:00:00"))
    launch = LaunchSection(elastic=changing, max_restarts=3, slurm=asked)
    spec = SlurmStarter().spec(Job(Path("/runs/one"), ClusterSection(nodes=2), launch))
    (script,) = (text for path, text in spec.files.items() if path.suffix == ".sbatch")
    assert "#SBATCH --nodes=1-4\n" in script
    assert "#SBATCH --ntasks" not in script, "Slurm would take a single node"
    assert script.index("#SBATCH --no-kill\n") < script.index("set -u")
    assert '--nodes=1 --ntasks=1 --nodelist="$node" \\\n' in script
    joins = '--launcher local --set launch.rendezvous="$head:$port"'
    assert f"/runs/one \\\n  {joins} &\n" in script
    assert f"/runs/one {joins}; echo\n" in script
    assert "printf ' %q' srun --nodes=1 --partition=gpus --time=1:00:00 " in script
