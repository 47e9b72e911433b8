"""Names and interfaces by which ranks meet, and the login of W&B."""

import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address

import psutil  # type: ignore[import-untyped]  # has no type hints of its own

from toolkit.doctor.finding import Finding, lacking
from toolkit.doctor.needs import Needs
from toolkit.text.redact import redact

_LOOPBACK = "ranks of other machines cannot reach it (pytorch/gloo#223)"


def check(needs: Needs) -> Iterator[Finding]:
    yield from _interface_variables(needs)
    if needs.several_machines:
        if "GLOO_SOCKET_IFNAME" not in os.environ:
            yield _host_name(needs.several_machines)
        yield from _master(needs.several_machines)
    if needs.wandb:
        yield _wandb_login(needs.wandb)


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
        fix=f"export GLOO_SOCKET_IFNAME={usable} on every machine, or give {name} its own "
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


def _interface_variables(needs: Needs) -> Iterator[Finding]:
    """Check that a named interface is there. Otherwise gloo and NCCL fail."""
    there = interfaces()
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        stated = os.environ.get(variable)
        if stated is None:
            continue
        exact = variable.startswith("GLOO")
        if _matches(stated, there, exact):
            yield Finding(variable, "ok", stated)
            continue
        library = "gloo" if exact else "NCCL"
        yield lacking(
            variable, f"{stated!r} names no interface here; there are {', '.join(there)}",
            cost=f"{library} cannot connect the ranks",
            fix=f"export {variable}={shlex.quote(_usable(there) or 'lo')}",
            # gloo is in every process group, also in that of one machine.
            needed_by=needs.run if exact else needs.gpu, otherwise="warning",
        )  # fmt: skip


def _matches(stated: str, there: dict[str, list[str]], exact: bool) -> bool:
    """Whether a name matches. gloo takes whole names. NCCL takes beginnings of names, `=name`
    and `^not,these`."""
    names = [one.strip().partition(":")[0] for one in stated.lstrip("^=").split(",")]
    if exact or stated.startswith("="):
        return all(name in there for name in names)
    return any(name.startswith(tuple(names)) is not stated.startswith("^") for name in there)


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


def _wandb_login(needed_by: str) -> Finding:
    """Whether there is a key. The key itself is never shown."""
    from requests.utils import get_netrc_auth  # by way of wandb

    server, key = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai", None
    with suppress(ValueError):  # of a .netrc that is no text
        key = os.environ.get("WANDB_API_KEY") or get_netrc_auth(server)
    server = redact(server)
    if key:
        return Finding("W&B login", "ok", f"a key for {server}")
    return Finding(
        "W&B login", "problem", f"no key for {server}", needed_by=needed_by,
        cost="nothing of the run reaches W&B",
        fix="wandb login, or export WANDB_API_KEY; or unset WANDB_MODE",
    )  # fmt: skip
