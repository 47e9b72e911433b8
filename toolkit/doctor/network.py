"""Names by which ranks of several machines meet."""

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address

from toolkit.doctor.finding import Finding, lacking
from toolkit.doctor.needs import Needs

_INTERFACE = "GLOO_SOCKET_IFNAME"


def check(needs: Needs) -> Iterator[Finding]:
    """The host's name, whose address gloo takes unless an interface is named, and MASTER_ADDR.
    Launchers set that one, and a shell may still have an old one."""
    if needs.several_machines is None:
        return
    names = {"host name": socket.gethostname(), "MASTER_ADDR": os.environ.get("MASTER_ADDR")}
    fixes = {
        "host name": f"export {_INTERFACE}=INTERFACE on every machine (`ip -brief address` "
        "lists them), or give this machine its own address in /etc/hosts",
        "MASTER_ADDR": "unset MASTER_ADDR, or export the address of rank 0's machine",
    }
    if _INTERFACE in os.environ:
        del names["host name"]
    for what, name in names.items():
        if name is None:
            continue
        found, is_reachable = _address(name)
        if is_reachable:
            yield Finding(what, "ok", found)
        else:
            yield lacking(
                what, found, fix=fixes[what], needed_by=needs.several_machines,
                cost="ranks of other machines cannot reach it (pytorch/gloo#223)",
            )  # fmt: skip


def _address(name: str) -> tuple[str, bool]:
    """The address of a name in words, and whether other machines may reach it."""
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        return f"{name!r} does not resolve: {error}", False
    return f"{name} is {address}", not ip_address(address).is_loopback
