"""MPI: the section of a recipe, and what the launcher needs."""

from typing import Annotated

from pydantic import Field

from toolkit.launcher import Launcher, Program
from toolkit.recipe.section import NonEmpty, Section


class MpiSection(Section):
    """The program with which `launcher: mpi` starts ranks."""

    command: NonEmpty = "mpirun"
    """Open MPI's `mpirun`, or that of MPICH or Intel MPI: a name, or a path."""
    options: Annotated[tuple[NonEmpty, ...], Field(strict=False)] = ()
    """Additional options of it, one word each, e.g. `[--mca, btl_tcp_if_include, eth0]`."""


MPI = Launcher(
    "mpi",
    "toolkit.extras.launchers.mpi_start:MpiStarter",
    section=MpiSection,
    several_machines=True,
    renders=True,
    programs=(
        Program(
            "mpirun",
            "apt-get install openmpi-bin (Debian, Ubuntu), dnf install openmpi (Fedora, RHEL)",
        ),
    ),
)
