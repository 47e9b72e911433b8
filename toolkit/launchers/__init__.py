"""The light half of each launcher: everything except starting ranks.

Schema, checks, doctor and rendering use a `Launcher` and never compare launchers' names. The
other half, a `Starter` (launchers/base.py), is imported when ranks are started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Launcher:
    """What a launcher needs and reads. The defaults are those of one that starts ranks on this
    machine."""

    name: str
    starter: str
    """`module:class` of its `Starter`."""
    here: bool = True
    """Whether the ranks start on this machine, not on machines that a scheduler chooses."""
    elastic: bool = False
    """Whether it continues on the remaining machines, and takes in new ones
    (`launch.elastic`)."""
    same_files: bool = True
    """Whether the ranks have this machine's files, which can then be checked here."""
    renders: bool = False
    """Whether its last file is a job, which `dmt render --to NAME` prints."""
    packages: tuple[str, ...] = ()
    """Distributions that it needs."""
    programs: Mapping[str, str] = field(default_factory=dict)
    """Programs that it needs where `dmt launch` runs, and how to get each."""

    def supervises(self, nodes: int) -> bool:
        """Whether `dmt launch` writes the run directory of a run on `nodes` machines before the
        ranks start from it. Otherwise rank 0 does, from `Job.recipe`."""
        return self.here and nodes == 1


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
    programs=dict.fromkeys(("sbatch", "srun"), _SLURM_CLIENT),
)
KUBERNETES = Launcher(
    "kubernetes",
    "toolkit.extras.launchers.kubernetes:KubernetesStarter",
    here=False,
    same_files=False,
    renders=True,
    programs={"kubectl": "install it as described in https://kubernetes.io/docs/tasks/tools"},
)
RAY = Launcher(
    "ray",
    "toolkit.extras.launchers.ray:RayStarter",
    here=False,
    elastic=True,
    packages=("ray",),
)
LAUNCHERS = {launcher.name: launcher for launcher in (LOCAL, SLURM, KUBERNETES, RAY)}
"""Every launcher by its name."""


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a, b or c`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
