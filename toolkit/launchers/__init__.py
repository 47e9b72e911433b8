"""The launchers of the core: what each needs and reads. What starts ranks is next to this."""

from toolkit.launcher import Launcher, Program

_SLURM_CLIENT = "apt-get install slurm-client (Debian, Ubuntu), or log in to the cluster"

LOCAL = Launcher(
    "local",
    "toolkit.launchers.local:LocalStarter",
    elastic=True,
)
SLURM = Launcher(
    "slurm",
    "toolkit.launchers.slurm:SlurmStarter",
    here=False,
    elastic=True,
    renders=True,
    example=("launch.slurm.time_limit=24:00:00",),
    programs=(Program("sbatch", _SLURM_CLIENT), Program("srun", _SLURM_CLIENT)),
)
