"""Several machines: what is started on each."""

import sys
from pathlib import Path

from toolkit.launchers import LOCAL
from toolkit.launchers.base import Job, Meeting
from toolkit.launchers.local import LocalStarter
from toolkit.launchers.slurm import SlurmStarter
from toolkit.recipe.schema import ClusterSection, ElasticSection, LaunchSection, SlurmSection

RUN = Path("/runs/one")
TWO = ClusterSection(nodes=2, gpus_per_node=4)


def job(run_dir: Path = RUN, **launch: object) -> Job:
    return Job(run_dir, TWO, LaunchSection(**launch), name="tiny", recipe="name: tiny\n")


def test_machines_meet_at_the_rendezvous_and_plan_on_rank_0():
    changing = ElasticSection(min_nodes=1, max_nodes=4)
    spec = LocalStarter().spec(job(rendezvous="node-1:29400", max_restarts=3, elastic=changing))
    assert spec.meeting == Meeting("node-1:29400", "tiny", 3, 1, 4, True)
    assert spec.argv == (
        *(sys.executable, "-u", "-m", "toolkit.cli.main", "train"),
        *("/runs/one/launch/recipe.yaml", "--run-dir", "/runs/one"),
    )
    assert spec.files == {Path("/runs/one/launch/recipe.yaml"): "name: tiny\n"}
    assert [*spec.rank_env] == [{"LOCAL_RANK": str(rank)} for rank in range(4)]
    assert not LOCAL.supervises(TWO.nodes)


def test_an_elastic_job_of_slurm_outlives_a_node():
    changing = ElasticSection(min_nodes=1, max_nodes=4)
    asked = SlurmSection(options=("--partition=gpus", "--time=1:00:00"))
    spec = SlurmStarter().spec(job(elastic=changing, max_restarts=3, slurm=asked))
    (script,) = (text for path, text in spec.files.items() if path.suffix == ".sbatch")
    assert "#SBATCH --nodes=1-4\n" in script
    assert "#SBATCH --ntasks" not in script, "Slurm would take a single node"
    assert script.index("#SBATCH --no-kill\n") < script.index("set -u")
    assert '--nodes=1 --ntasks=1 --nodelist="$node" \\\n' in script
    joins = '--launcher local --set launch.rendezvous="$head:$port"'
    assert f"/runs/one \\\n  {joins} &\n" in script
    assert f"/runs/one {joins}; echo\n" in script
    assert "printf ' %q' srun --nodes=1 --partition=gpus --time=1:00:00 " in script
