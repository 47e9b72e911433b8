"""PyTorch's variables of a rank started by Slurm's `srun` or an MPI's `mpirun`.

PyTorch reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Schedulers use their
own names (Slurm: `man srun`, OUTPUT ENVIRONMENT VARIABLES; Open MPI: `man mpirun`; MPICH and
Intel MPI: what hydra sets). Only a step of `srun` counts: the batch script itself also has a
SLURM_PROCID.
"""

import re
from collections.abc import Iterator, Mapping
from zlib import crc32

from toolkit.errors import PlanError

_FIRST_PORT, _PORTS = 20_000, 12_000


def scheduler_ranks(env: Mapping[str, str]) -> dict[str, str]:
    """PyTorch's variables for a rank that a scheduler started. Empty for any other.

    Raises PlanError if the machine of rank 0 cannot be determined.
    """
    if "RANK" in env:
        return {}
    # Inside Slurm, mpirun starts its own processes by srun, whose variables are not the ranks'.
    if "OMPI_COMM_WORLD_SIZE" in env:
        return _mpi(env, _OPEN_MPI)
    if "MPI_LOCALNRANKS" in env:
        return _mpi(env, _HYDRA)
    if "SLURM_STEP_NUM_TASKS" in env:
        return _slurm(env)
    return {}


def _slurm(env: Mapping[str, str]) -> dict[str, str]:
    node = int(env.get("SLURM_NODEID", 0))
    per_node = list(_tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"]))
    port = _FIRST_PORT + int(env.get("SLURM_JOB_ID", 0)) % _PORTS
    found = {
        "RANK": env["SLURM_PROCID"],
        "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": env["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node[node]),
        "MASTER_ADDR": first_host(env["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(port),
    }
    return {**found, **_stated(env)}


_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
_HYDRA = {
    "RANK": "PMI_RANK",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}


def _mpi(env: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    job = env.get("PMIX_NAMESPACE", "").encode()
    found = {
        **{ours: env[theirs] for ours, theirs in names.items()},
        "MASTER_PORT": str(_FIRST_PORT + crc32(job) % _PORTS),
        **_stated(env),
    }
    if "MASTER_ADDR" not in found:
        if found["WORLD_SIZE"] != found["LOCAL_WORLD_SIZE"]:
            raise PlanError(
                "mpirun started ranks on several machines, and MASTER_ADDR is not set",
                fix="mpirun … env MASTER_ADDR=HOST python …, the machine of rank 0",
            )
        found["MASTER_ADDR"] = "127.0.0.1"
    return found


def _stated(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that the user set."""
    return {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in env}


def _tasks_per_node(text: str) -> Iterator[int]:
    """`2(x3),1` → 2, 2, 2, 1."""
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        assert match is not None, f"SLURM_STEP_TASKS_PER_NODE is {text!r}"
        yield from [int(match[1])] * int(match[2] or 1)


def first_host(nodes: str) -> str:
    """The first machine of a Slurm host list: `gpu[007-012,20],login` → `gpu007`."""
    match = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None or not match[0]:
        raise PlanError(f"SLURM_STEP_NODELIST is {nodes!r}", fix="set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")
