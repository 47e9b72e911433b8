"""What some tests need beyond Python and make: Debian packages, and what only root may do.

Where it is missing they are skipped with its name; with DMT_TEST_NEEDS=all (CI) they fail.

    python tests/needs.py    # the Debian packages that this machine lacks, for apt-get install
"""

import os
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path
from shutil import which

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
SEARCH_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
"""Where daemons are found, which a user's PATH may leave out."""
PACKAGES = {
    "make": "make",
    "g++": "c++",
    "python3-dev": f"{sysconfig.get_path('include')}/Python.h",
    "libaio-dev": "/usr/include/libaio.h",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "slurm-client": "srun",
    "munge": "munged",
    "iproute2": "ip",
    "openmpi-bin": "mpirun.openmpi",
    "mpich": "mpirun.mpich",
}
"""Debian package → a program, or a header, that it installs."""
COMPILER = ("g++", "python3-dev")
"""What building an extension of Python needs."""
ROOT = "root"
NAMESPACES = "network namespaces"


def is_met(need: str) -> bool:
    """Is there such a Debian package, a right (ROOT) or a feature (NAMESPACES) here?"""
    if need == ROOT:
        return os.geteuid() == 0
    if need == NAMESPACES:
        return subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    found = PACKAGES[need]
    return Path(found).exists() or which(found, path=SEARCH_PATH) is not None


def require(*needs: str) -> None:
    """Skip the test, or fail it in CI, unless this machine has all `needs`."""
    missing = [need for need in needs if not is_met(need)]
    packages = [need for need in missing if need in PACKAGES]
    install = [f"apt-get install {' '.join(packages)}"] if packages else []
    if missing:
        unmet(", ".join([*install, *(need for need in missing if need not in PACKAGES)]))


def is_of_ci(package: str) -> bool:
    """Whether CI's version of a package is installed, of which some tables are."""
    pin = f"{package}=={version(package).partition('+')[0]}"
    return pin in CONSTRAINTS.read_text(encoding="utf-8").splitlines()


def unmet(reason: str) -> None:
    """Skip the test because of what the machine lacks; fail it where nothing may be missing."""
    import pytest

    if os.environ.get("DMT_TEST_NEEDS") == "all":
        pytest.fail(f"needs: {reason}", pytrace=False)
    pytest.skip(f"needs: {reason}")


if __name__ == "__main__":
    print(*(package for package in PACKAGES if not is_met(package)))
