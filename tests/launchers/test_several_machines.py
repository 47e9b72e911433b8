"""torchrun and DeepSpeed on several machines: commands, and what is refused."""

import sys
from pathlib import Path

import pytest

from toolkit.errors import BackendUnavailable, PlanError
from toolkit.launchers import TORCHRUN, SlurmSection
from toolkit.launchers.base import Job
from toolkit.launchers.deepspeed import DeepSpeedStarter
from toolkit.launchers.process import StopSignals
from toolkit.launchers.slurm import SlurmStarter
from toolkit.launchers.torchrun import TorchrunStarter
from toolkit.recipe.schema import ClusterSection, ElasticSection, LaunchSection

RUN = Path("/runs/one")
TWO = ClusterSection(nodes=2, gpus_per_node=4)


def job(run_dir: Path = RUN, **launch: object) -> Job:
    return Job(run_dir, TWO, LaunchSection(**launch), name="tiny", recipe="name: tiny\n")


def test_torchrun_meets_at_the_rendezvous_and_plans_on_rank_0():
    spec = TorchrunStarter().spec(job(rendezvous="node-1:29400", max_restarts=3))
    assert spec.argv == (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node-1:29400"),
        *(
            "--rdzv-id=tiny",
            "--rdzv-conf=join_timeout=600,read_timeout=600",
            "--max-restarts=3",
        ),
        *("--nproc-per-node=4", "-m", "toolkit.cli.main", "train"),
        *("/runs/one/launch/recipe.yaml", "--run-dir", "/runs/one"),
    )
    assert spec.files == {Path("/runs/one/launch/recipe.yaml"): "name: tiny\n"}
    assert not TORCHRUN.supervises(TWO.nodes)


def test_an_elastic_torchrun_meets_with_a_range_of_machines():
    changing = ElasticSection(min_nodes=1, max_nodes=4)
    launch = job(elastic=changing, rendezvous="node-1:29400", max_restarts=3, grace_s=90.5)
    spec = TorchrunStarter().spec(launch)
    assert spec.argv[3:9] == (
        *("--nnodes=1:4", "--rdzv-backend=c10d", "--rdzv-endpoint=node-1:29400"),
        "--rdzv-id=tiny",
        "--rdzv-conf=join_timeout=600,read_timeout=600,last_call_timeout=10,"
        "keep_alive_interval=2,keep_alive_max_attempt=3",
        "--max-restarts=3",
    )
    assert spec.argv[9] == "--shutdown-timeout=91"
    assert spec.env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_an_elastic_job_of_slurm_outlives_a_node():
    changing = ElasticSection(min_nodes=1, max_nodes=4)
    asked = SlurmSection(partition="gpus", time_limit="1:00:00")
    spec = SlurmStarter().spec(job(elastic=changing, spares=1, max_restarts=3, slurm=asked))
    (script,) = (text for path, text in spec.files.items() if path.suffix == ".sbatch")
    assert "#SBATCH --nodes=1-5\n" in script
    assert "#SBATCH --ntasks" not in script, "Slurm would take a single node"
    assert script.index("#SBATCH --no-kill\n") < script.index("set -u")
    assert '--nodes=1 --ntasks=1 --nodelist="$node" \\\n' in script
    joins = '--launcher torchrun --set launch.rendezvous="$head:$port"'
    assert f"/runs/one \\\n  {joins} &\n" in script
    assert f"/runs/one {joins}; echo\n" in script
    assert "printf ' %q' srun --nodes=1 --partition=gpus --time=1:00:00 " in script


def test_torchrun_needs_a_meeting_point():
    with pytest.raises(PlanError, match=r"--set launch\.rendezvous=HOST:29400"):
        TorchrunStarter().spec(job())


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hostfile, and `pdsh` and `ssh` on the search path."""
    for program in ("pdsh", "ssh"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# the machines\nlocalhost slots=4\nnode-2 slots=4  # far\n")
    return hostfile


def test_deepspeed_starts_the_machines_of_the_hostfile(hosts):
    spec = DeepSpeedStarter().spec(job(hostfile=str(hosts)))
    assert spec.argv[1:4] == (
        f"--hostfile={hosts}",
        "--launcher=pdsh",
        "--master_addr=localhost",
    )
    assert spec.argv[5:] == (
        *("--no_ssh_check", "--no_local_rank"),
        *(str(Path(sys.executable).with_name("dmt")), "train", "/runs/one"),
    )
    exported = RUN / "launch" / "deepspeed.env"
    assert spec.env["DS_ENV_FILE"] == str(exported)
    assert "DS_ACCELERATOR=cpu\n" in spec.files[exported]
    assert "ServerAliveInterval" in spec.env["PDSH_SSH_ARGS_APPEND"]
    assert spec.remote


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("node-1 slots=4\n", "has 1 machine"),
        ("node-1 slots=4\nnode-2 slots=2\n", "node-2 slots=2"),
    ],
)
def test_a_hostfile_that_is_not_the_cluster_is_refused(hosts, text, found):
    hosts.write_text(text)
    with pytest.raises(PlanError, match=rf"{found}(.|\n)*2 lines of `HOST slots=4`"):
        DeepSpeedStarter().spec(job(hostfile=str(hosts)))


def test_deepspeed_needs_a_hostfile_and_a_way_to_the_machines(hosts):
    with pytest.raises(PlanError, match=r"--set launch\.hostfile=FILE"):
        DeepSpeedStarter().spec(job())
    with pytest.raises(PlanError, match="cannot be read"):
        DeepSpeedStarter().spec(job(hostfile=str(hosts.with_name("none"))))
    with pytest.raises(BackendUnavailable, match=r"no `mpirun`(.|\n)*openmpi-bin"):
        DeepSpeedStarter().spec(job(hostfile=str(hosts), remote_start="openmpi"))
    (hosts.parent / "ssh").unlink()
    with pytest.raises(BackendUnavailable, match="no `ssh`"):
        DeepSpeedStarter().spec(job(hostfile=str(hosts)))


@pytest.mark.parametrize("name", ["a b", "$(touch x)", "x;y", "`id`", "ü", "a'b"])
def test_deepspeed_refuses_paths_that_a_shell_would_read(hosts, name):
    """DeepSpeed joins its command with spaces and hands it to ssh."""
    with pytest.raises(PlanError, match="to a shell unquoted"):
        DeepSpeedStarter().spec(job(RUN / name, hostfile=str(hosts)))


def test_a_machine_that_ssh_does_not_reach_is_named(hosts, monkeypatch):
    monkeypatch.setenv("PATH", f"/usr/bin:/bin:{hosts.parent}")
    hosts.write_text("localhost slots=4\nnode-2.invalid slots=4\n")
    launcher = DeepSpeedStarter()
    spec = launcher.spec(job(hostfile=str(hosts)))
    with pytest.raises(BackendUnavailable, match=r"node-2\.invalid: "):
        launcher.run(spec, StopSignals())
