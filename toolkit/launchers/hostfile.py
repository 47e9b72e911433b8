"""A hostfile: the machines of a cluster, one `HOST slots=N` a line."""

import socket
from pathlib import Path

from toolkit.errors import PlanError
from toolkit.launchers.base import Job


def read_hostfile(hostfile: Path) -> list[list[str]]:
    """The words of every line, the machine's name first; comments are left out.

    Raises PlanError when it cannot be read, names no machine, or names one that ssh would
    take for an option.
    """
    fix = "a file with a line `HOST slots=N` for each machine"
    try:
        text = hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"hostfile {hostfile} cannot be read: {error}", fix=fix) from error
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise PlanError(f"hostfile {hostfile} names no machine", fix=fix)
    for host, *_ in found:
        if host.startswith("-"):
            raise PlanError(f"hostfile {hostfile}: {host!r} is no machine's name", fix=fix)
    return found


def hosts_of(job: Job) -> list[str]:
    """The hostfile's machines. Raises PlanError when they are not those of the cluster."""
    hostfile, cluster = job.launch.hostfile, job.cluster
    wanted = f"{cluster.nodes} lines of `HOST slots={cluster.gpus_per_node}`"
    if hostfile is None:
        raise PlanError(
            f"launch.hostfile: nothing, but cluster.nodes is {cluster.nodes}",
            fix=f"--set launch.hostfile=FILE, a file with {wanted}",
        )
    found = read_hostfile(Path(hostfile))
    slots = f"slots={cluster.gpus_per_node}"
    if len(found) != cluster.nodes or any(line[1:] != [slots] for line in found):
        raise PlanError(
            f"launch.hostfile: {hostfile} has {len(found)} machine(s): "
            f"{'; '.join(' '.join(line) for line in found[:4])}",
            fix=f"{wanted}, or --cluster with what is there",
        )
    return [line[0] for line in found]


def check_address(host: str) -> str:
    """The host, if its name can be resolved; an ssh alias may not be."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise PlanError(
            f"launch.hostfile: {host}, the first machine, has no address: {error}",
            fix="write its name or address as the ranks can resolve it",
        ) from error
    return host
