"""The launchers of the core: what each needs and reads. What starts ranks is next to this."""

from typing import Annotated, TypeAlias

from pydantic import Field

from toolkit.launcher import Launcher, Program
from toolkit.recipe.section import NonEmpty, Positive, Section, Wording

_SLURM_CLIENT = "apt-get install slurm-client (Debian, Ubuntu), or log in to the cluster"
SlurmValue: TypeAlias = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,:@+-]*$", max_length=200),
    Wording("letters, digits and `_.,:@+-`"),
]
SlurmTime: TypeAlias = Annotated[
    str,
    Field(pattern=r"^([0-9]+-)?[0-9]{1,3}:[0-9]{2}:[0-9]{2}$"),
    Wording("HH:MM:SS or DAYS-HH:MM:SS"),
]
SlurmOption: TypeAlias = Annotated[
    str,
    Field(pattern=r"^--[a-z][a-z-]*(=[A-Za-z0-9_.,:@+%/*\[\]&|()-]+)?$", max_length=400),
    Wording("--name or --name=value, without spaces and quotes"),
]


class SlurmSection(Section):
    """The batch job that `launcher: slurm` submits."""

    partition: SlurmValue | None = None
    """`sbatch --partition`."""
    account: SlurmValue | None = None
    """`sbatch --account`."""
    qos: SlurmValue | None = None
    """`sbatch --qos`."""
    time_limit: SlurmTime | None = None
    """`sbatch --time`: `HH:MM:SS` or `DAYS-HH:MM:SS`."""
    cpus_per_node: Positive | None = None
    """`sbatch --cpus-per-task`: CPU cores for all ranks of a machine together."""
    stop_before_s: Positive = 300
    """Seconds before the time limit at which the run saves and stops."""
    requeue: bool = True
    """Requeue the job if it stopped before its end, or if a machine failed."""
    options: Annotated[tuple[SlurmOption, ...], Field(strict=False)] = ()
    """Additional options of sbatch, e.g. `[--exclusive, --mem=0, --constraint=a100]`. The
    script names what it leaves to the cluster's defaults: cores, memory, time, other jobs."""
    setup: NonEmpty | None = None
    """A shell file that the job sources first, e.g. one that loads modules."""


LOCAL = Launcher(
    "local",
    "toolkit.launchers.local:LocalStarter",
    oversees="one machine",
    elastic=True,
)
SLURM = Launcher(
    "slurm",
    "toolkit.launchers.slurm:SlurmStarter",
    section=SlurmSection,
    oversees="never",
    elastic=True,
    renders=True,
    example=("launch.slurm.time_limit=24:00:00",),
    programs=(Program("sbatch", _SLURM_CLIENT), Program("srun", _SLURM_CLIENT)),
)
