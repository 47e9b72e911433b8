"""torchrun on several machines: commands, and what is refused."""

import sys
from pathlib import Path

import pytest

from toolkit.errors import PlanError
from toolkit.launchers import TORCHRUN, SlurmSection
from toolkit.launchers.base import Job
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
