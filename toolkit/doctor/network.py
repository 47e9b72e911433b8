"""Names, ports and interfaces of the rendezvous, and whether machines answer."""

import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.doctor.finding import Finding, Level, lacking
from toolkit.doctor.needs import SSH_PORT, Needs
from toolkit.errors import PlanError
from toolkit.launchers.base import free_port

USUAL_PORT = 29500
"""Of torchrun and DeepSpeed, where none is named."""
REACH_S = 3.0
"""How long a machine may take to answer."""

_LOOPBACK = "ranks of other machines cannot reach it (pytorch/gloo#223)"


def check(needs: Needs, hostfile: Path | None) -> Iterator[Finding]:
    """`hostfile`: machines to ask as well. Raises PlanError when it cannot be read."""
    yield from _interface_variables(needs)
    yield _host_name(needs)
    yield from _master(needs)
    yield _port()
    if hostfile is not None:
        yield from reach(read_hostfile(hostfile), SSH_PORT, f"--hostfile {hostfile}")


def read_hostfile(hostfile: Path) -> list[str]:
    """The machines of a file with a line `HOST slots=N` for each.

    Raises PlanError when it cannot be read, or names no machine.
    """
    fix = "a file with a line `HOST slots=N` for each machine"
    try:
        text = hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"hostfile {hostfile} cannot be read: {error}", fix=fix) from error
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    hosts = [host for host, *_ in filter(None, lines)]
    if not hosts:
        raise PlanError(f"hostfile {hostfile} names no machine", fix=fix)
    return hosts


def interfaces() -> dict[str, list[str]]:
    """Addresses of each network interface that is up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def _host_name(needs: Needs) -> Finding:
    """What gloo listens on: without GLOO_SOCKET_IFNAME, what the host's name resolves to."""
    name, there = socket.gethostname(), interfaces()
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return Finding("host name", "ok", f"{name}; GLOO_SOCKET_IFNAME decides for gloo")
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError as error:
        addresses, why = [], f"does not resolve ({error})"
    own = [one for one in addresses if any(one in listed for listed in there.values())]
    if own and not _is_loopback(own[0]):
        interface = next(name for name, listed in there.items() if own[0] in listed)
        text = f"{name} is {own[0]}: gloo uses interface {interface}"
        return Finding("host name", "ok", text)
    if own or any(map(_is_loopback, addresses)):
        why = f"resolves to {(own or addresses)[0]}"
    elif addresses:
        why = f"resolves to {addresses[0]}, an address of none of this machine's interfaces"
    usable = shlex.quote(_usable(there) or "INTERFACE")
    fix = f"export GLOO_SOCKET_IFNAME={usable} on every machine, or give "
    fix += f"{name} its own address in /etc/hosts"
    text = f"{name} {why}: gloo falls back to loopback, and {_LOOPBACK}"
    return lacking("host name", text, fix, needs.several_machines)


def _usable(there: dict[str, list[str]]) -> str | None:
    """The first interface that other machines may reach."""
    for name, addresses in there.items():
        if any(not _is_loopback(one) for one in addresses) and not name.startswith("docker"):
            return name
    return None


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback


def _interface_variables(needs: Needs) -> Iterator[Finding]:
    """An interface that is named must be there: gloo and NCCL fail otherwise."""
    there = interfaces()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        stated = os.environ.get(variable)
        if stated is None:
            if variable.startswith("NCCL"):
                text = "not set: NCCL takes InfiniBand, then the first one but docker and lo"
                yield Finding(variable, "ok", text)
            continue
        exact = variable.startswith("GLOO")
        if _matches(stated, there, exact):
            yield Finding(variable, "ok", stated)
            continue
        text = f"{stated!r} names no interface here; there are {', '.join(there)}"
        fix = f"export {variable}={shlex.quote(_usable(there) or 'lo')}"
        # gloo is in every process group, also in that of one machine.
        yield lacking(variable, text, fix, needs.run if exact else needs.gpu, "warning")


def _matches(stated: str, there: dict[str, list[str]], exact: bool) -> bool:
    """gloo takes whole names; NCCL beginnings of names, `=name` and `^not,these`."""
    if exact:
        return all(name.strip() in there for name in stated.split(","))
    if stated.startswith("^"):
        others = tuple(stated[1:].lstrip("=").split(","))
        return any(not name.startswith(others) for name in there)
    if stated.startswith("="):
        return any(name in there for name in stated[1:].split(","))
    names = [one.partition(":")[0] for one in stated.split(",")]
    return any(name.startswith(tuple(names)) for name in there)


def _master(needs: Needs) -> Iterator[Finding]:
    """MASTER_ADDR, which launchers set and which may be left over in a shell."""
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        return
    several: str | bool | None = needs.several_machines
    with suppress(ValueError):  # a launcher around this process may have chosen them
        world = int(os.environ.get("WORLD_SIZE", "1"))
        several = several or world > int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    try:
        resolved = str(socket.getaddrinfo(address, None)[0][4][0])
    except OSError as error:
        text = f"{address!r} does not resolve: {error}"
        fix = "unset MASTER_ADDR, or name rank 0's machine by its address"
        level: Level = "problem" if several else "warning"
        yield Finding("MASTER_ADDR", level, text, needs.several_machines, fix)
        return
    if several and _is_loopback(resolved):
        text = f"{address} is {resolved}: {_LOOPBACK}"
        fix = "export MASTER_ADDR=the address of rank 0's machine"
        yield Finding("MASTER_ADDR", "problem", text, needs.several_machines, fix)
    else:
        yield Finding("MASTER_ADDR", "ok", f"{address} is {resolved}")


def _port() -> Finding:
    """A taken port is a note: `dmt launch` looks for a free one itself."""
    free = free_port()
    with socket.socket() as probe:
        try:
            probe.bind(("", USUAL_PORT))
        except OSError as error:
            text = f"{USUAL_PORT}, that of torchrun and deepspeed, is taken: {error.strerror}"
            fix = f"torchrun --master-port={free}, deepspeed --master_port={free}"
            return Finding("port", "note", text, None, fix)
    return Finding("port", "ok", f"{USUAL_PORT} is free, and so is {free}")


def reach(hosts: Sequence[str], port: int, needed_by: str) -> Iterator[Finding]:
    """Ask every machine at the same time whether it accepts connections."""
    with ThreadPoolExecutor(max_workers=64) as threads:
        answers = threads.map(lambda host: _connect(host, port), hosts)
        for host, failure in zip(hosts, answers, strict=True):
            name = f"machine {host}"
            if failure is None:
                yield Finding(name, "ok", f"accepts connections to port {port}")
                continue
            fix = f"ssh -- {shlex.quote(host)} true, from here, must work without a password"
            yield Finding(name, "problem", failure, needed_by, fix)


def _connect(host: str, port: int) -> str | None:
    """None, or why the connection failed."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return f"does not resolve: {error}"
    with socket.socket(address[0]) as connection:
        connection.settimeout(REACH_S)
        try:
            connection.connect(address[4])
        except TimeoutError:
            return f"{address[4][0]} port {port} did not answer within {REACH_S:g} s"
        except OSError as error:
            return f"{address[4][0]} port {port}: {error.strerror}"
    return None
