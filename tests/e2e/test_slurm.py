"""Jobs of a real Slurm with two nodes, both on this machine."""

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import Project
from tests.e2e.elastic_run import ELASTIC, FORTY, forty_steps, losses, resized
from tests.e2e.hooks import hooked
from tests.e2e.product import checkpoints, curve, events, run, settings, started, steps_logged
from tests.e2e.slurm_cluster import PACKAGES, Slurm, slurm_cluster
from tests.processes import ROOT, wait_until
from tests.warm_program import warm_program

pytestmark = [pytest.mark.slow, pytest.mark.needs(*PACKAGES)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def assert_same_start(run_dir: Path, reference: Path) -> None:
    """The steps that both made have the same losses."""
    found, expected = curve(run_dir), curve(reference)
    both = found.keys() & expected.keys()
    assert len(both) >= 6
    assert {step: found[step] for step in both} == {
        step: pytest.approx(expected[step], rel=1e-5) for step in both
    }


def test_python_under_srun(slurm: Slurm, project: Project, ddp_run: Path) -> None:
    """No launcher at all: the ranks' places come from Slurm's own variables."""
    worker = [warm_program(), ROOT / "launch" / "train.py", project.recipe]
    argv = ["srun", "-N1", "-n2", *map(str, worker), "--run-dir", "srun"]
    steps = settings({"training.steps": 6})
    run([*argv, *steps], project.folder, slurm.env, code=0)
    assert_same_start(project.folder / "srun", ddp_run)


def test_two_nodes_save_before_the_limit_and_go_on(
    slurm: Slurm, project: Project, ddp_run: Path
) -> None:
    """The warning signal saves and stops, the job is queued again, and finishes."""
    run_dir = project.folder / "slurm"
    changes = {"cluster.nodes": 2, "cluster.gpus_per_node": 1, "training.steps": 100}
    env = slurm.env | hooked("warm_job", DMT_TEST_PYTHON=warm_program())
    ended = project.launch("slurm", changes, "--launcher", "slurm", env=env)
    job = ended.out.split()[-1]
    assert ended.out == f"Submitted batch job {job}\n"
    wait_until(
        lambda: (run_dir / "metrics.jsonl").exists() and len(curve(run_dir)) > 2, "steps"
    )
    slurm.ask("scancel", "--signal=USR1", "--batch", job)
    wait_until(lambda: slurm.state(job) == "PENDING", "queued again")
    (stopped,) = events(run_dir, "end")
    assert stopped["exit_code"] == 75
    assert checkpoints(run_dir) == [stopped["step"]]
    # Slurm waits two minutes by itself. It refuses a start in the second of the requeue.
    time.sleep(10)
    slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end")
    assert sorted(curve(run_dir)) == list(range(1, 101))
    assert_same_start(run_dir, ddp_run)
    assert {"plan.json", "export"} <= {path.name for path in run_dir.iterdir()}


def rank_of(run_dir: Path) -> psutil.Process:
    """The only rank of a run."""
    (found,) = (
        process
        for process in psutil.process_iter(["environ", "cmdline"])
        if str(run_dir) in (process.info["cmdline"] or ())
        and (process.info["environ"] or {}).get("RANK") == "0"
    )
    return found


def has_met(command: psutil.Process, port: int) -> bool:
    """Whether a process below this one has reached the meeting point."""
    found = [
        one for child in command.children(recursive=True) for one in child.net_connections()
    ]
    return any(one.raddr and one.raddr.port == port for one in found)


@pytest.mark.soak
def test_an_elastic_job_loses_a_node_and_takes_it_in_again(
    slurm: Slurm, project: Project
) -> None:
    """Slurm adds no node to a job: the one that is back joins by the line in the job's log."""
    expected = forty_steps(project)
    run_dir = project.folder / "slurm-elastic"
    changes = {**ELASTIC, **FORTY, "launch.elastic": "{min_nodes: 1, max_nodes: 2}"}
    command = project.command(run_dir.name, changes, "--launcher", "slurm")
    job = slurm.ask(*command, folder=project.folder).split()[-1]
    wait_until(lambda: steps_logged(run_dir) >= 4, "steps")
    lost = slurm.nodes[1]
    slurm.lose(lost)
    wait_until(lambda: resized(run_dir) == [(2, 1)], "the run on one node")
    rank = rank_of(run_dir)
    rank.suspend()
    slurm.start_node(lost)
    (line,) = (
        line
        for line in (run_dir / "logs" / f"slurm-{job}.log").read_text().splitlines()
        if line.startswith("another node joins by ")
    )
    join = shlex.split(line)[4:]
    port = int(join[-1].rpartition(":")[2])
    with started([join[0], f"--nodelist={lost}", *join[1:]], project.folder, slurm.env) as srun:
        srun.wait_for(lambda: any(has_met(one, port) for one in srun.alive()), "the node")
        rank.resume()
        srun.end(code=0)
    wait_until(lambda: slurm.state(job) == "COMPLETED", "the end")
    assert resized(run_dir) == [(2, 1), (1, 2)]
    assert losses(run_dir) == expected
