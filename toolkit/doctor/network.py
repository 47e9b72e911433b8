"""Names and interfaces by which ranks meet."""

import os
import shlex
import socket
from collections.abc import Iterator
from ipaddress import ip_address

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.doctor.finding import Finding, lacking
from toolkit.doctor.needs import Needs

_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = "ranks of other machines cannot reach it (pytorch/gloo#223)"


def check(needs: Needs) -> Iterator[Finding]:
    yield from _interface_variable(needs)
    if needs.several_machines:
        if _INTERFACE not in os.environ:
            yield _host_name(needs.several_machines)
        yield from _master(needs.several_machines)


def interfaces() -> dict[str, list[str]]:
    """Addresses of each network interface that is up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [one.address.partition("%")[0] for one in addresses if one.family in families]
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def _host_name(needed_by: str) -> Finding:
    """Check the host's name. gloo listens on its address unless GLOO_SOCKET_IFNAME is set."""
    name, there = socket.gethostname(), interfaces()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    except OSError as error:
        addresses, why = [], f"does not resolve ({error})"
    own = [one for one in addresses if any(one in listed for listed in there.values())]
    if own and not _is_loopback(own[0]):
        interface = next(name for name, listed in there.items() if own[0] in listed)
        return Finding("host name", "ok", f"{name} is {own[0]}: gloo uses {interface}")
    if own or any(map(_is_loopback, addresses)):
        why = f"resolves to {(own or addresses)[0]}"
    elif addresses:
        why = f"resolves to {addresses[0]}, an address of none of this machine's interfaces"
    usable = shlex.quote(_usable(there) or "INTERFACE")
    return Finding(
        "host name", "problem", f"{name} {why}",
        cost=f"gloo falls back to loopback: {_LOOPBACK}", needed_by=needed_by,
        fix=f"export {_INTERFACE}={usable} on every machine, or give {name} its own "
        "address in /etc/hosts",
    )  # fmt: skip


def _usable(there: dict[str, list[str]]) -> str | None:
    """The first interface that other machines may reach."""
    for name, addresses in there.items():
        if any(not _is_loopback(one) for one in addresses) and not name.startswith("docker"):
            return name
    return None


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback


def _interface_variable(needs: Needs) -> Iterator[Finding]:
    """Check that gloo's interface is there. gloo is in every process group, also in that of
    one machine."""
    stated, there = os.environ.get(_INTERFACE), interfaces()
    if stated is None:
        return
    if all(name.strip() in there for name in stated.split(",")):
        yield Finding(_INTERFACE, "ok", stated)
        return
    yield lacking(
        _INTERFACE, f"{stated!r} names no interface here; there are {', '.join(there)}",
        cost="gloo cannot connect the ranks",
        fix=f"export {_INTERFACE}={shlex.quote(_usable(there) or 'lo')}",
        needed_by=needs.run, otherwise="warning",
    )  # fmt: skip


def _master(needed_by: str) -> Iterator[Finding]:
    """Check MASTER_ADDR. Launchers set it, and a shell may still have an old one."""
    address = os.environ.get("MASTER_ADDR")
    if address is None:
        return
    try:
        resolved = str(socket.getaddrinfo(address, None)[0][4][0])
    except (OSError, UnicodeError) as error:
        found, cost = f"{address!r} does not resolve: {error}", "ranks find no rank 0"
    else:
        found, cost = f"{address} is {resolved}", _LOOPBACK
        if not _is_loopback(resolved):
            yield Finding("MASTER_ADDR", "ok", found)
            return
    yield Finding(
        "MASTER_ADDR", "problem", found, cost=cost, needed_by=needed_by,
        fix="unset MASTER_ADDR, or export the address of rank 0's machine",
    )  # fmt: skip
