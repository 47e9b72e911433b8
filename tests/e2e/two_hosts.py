"""Hosts on this machine: network namespaces on a switch."""

import ctypes
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree

import psutil

from tests.needs import NAMESPACES, ROOT, SEARCH_PATH

HOSTS = (f"dmt{os.getpid()}-a", f"dmt{os.getpid()}-b")
"""Of this test run alone."""
THIRD = f"dmt{os.getpid()}-c"
"""The one that joins later."""
ALL_HOSTS = (*HOSTS, THIRD)
ADDRESS = {host: f"10.77.0.{number}" for number, host in enumerate(ALL_HOSTS, 1)}
SWITCH = f"dmt{os.getpid()}-switch"
WIRE = "dmt0"
"""The interface's name in both hosts: GLOO_SOCKET_IFNAME has one value for all."""
NEEDS = ("iproute2", ROOT, NAMESPACES)
HOST = "DMT_TEST_HOST"
"""Variable with the host that a warm process is on; those that it starts have it, too."""


def _env() -> dict[str, str]:
    return {**os.environ, "PATH": SEARCH_PATH}


def _run(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], env=_env(), capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"


class TwoHosts:
    """The two `HOSTS`, and the third one."""

    def env(self, host: str) -> dict[str, str]:
        """What a user has in the environment on a host."""
        return {
            HOST: host,
            "GLOO_SOCKET_IFNAME": WIRE,
            "OMP_NUM_THREADS": "1",  # both hosts have the same cores
            "PATH": SEARCH_PATH,
        }

    def cut(self, host: str) -> None:
        """Take the host's wire away: from now on nothing arrives, and nothing is refused."""
        _run("ip", "-n", host, "link", "set", WIRE, "down")

    def mend(self, host: str) -> None:
        """Put it back."""
        _run("ip", "-n", host, "link", "set", WIRE, "up")

    def processes(self, host: str) -> list[psutil.Process]:
        """What runs there."""
        done = subprocess.run(
            ["ip", "netns", "pids", host], env=_env(), capture_output=True, text=True
        )
        found = []
        for pid in map(int, done.stdout.split()):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
        return found

    def kill_all(self, host: str) -> None:
        """Kill everything on a host."""
        for process in self.processes(host):
            with suppress(psutil.NoSuchProcess):
                process.kill()


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Make them; leave no namespace, file or process behind."""
    hosts = TwoHosts()
    try:
        for host in (SWITCH, *ALL_HOSTS):
            _run("ip", "netns", "add", host)
        _wires()
        for host in ALL_HOSTS:
            _names(host)
        yield hosts
    finally:
        for host in (*ALL_HOSTS, SWITCH):
            hosts.kill_all(host)
            subprocess.run(["ip", "netns", "del", host], env=_env(), capture_output=True)
            rmtree(Path("/etc/netns") / host, ignore_errors=True)


def _wires() -> None:
    _run("ip", "-n", SWITCH, "link", "add", "switch", "type", "bridge")
    _run("ip", "-n", SWITCH, "link", "set", "switch", "up")
    for number, host in enumerate(ALL_HOSTS):
        port, inside = f"port{number}", ("ip", "-n", host)
        pair = ("ip", "link", "add", WIRE, "netns", host, "type", "veth")
        _run(*pair, "peer", "name", port, "netns", SWITCH)
        _run("ip", "-n", SWITCH, "link", "set", port, "master", "switch", "up")
        _run(*inside, "addr", "add", f"{ADDRESS[host]}/24", "dev", WIRE)
        _run(*inside, "link", "set", WIRE, "up")
        _run(*inside, "link", "set", "lo", "up")


def enter(host: str) -> None:
    """Let this process be on a host, as `ip netns exec` does, with a name of its own, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    slave, bind, network, mounts, names = 0x84000, 0x1000, 0x40000000, 0x20000, 0x4000000
    hosts = f"/etc/netns/{host}/hosts".encode()
    with Path(f"/run/netns/{host}").open() as namespace:
        failed = (
            libc.setns(namespace.fileno(), network)
            or libc.unshare(mounts | names)
            or libc.mount(b"none", b"/", None, slave, None)
            or libc.mount(hosts, b"/etc/hosts", None, bind, None)
        )
    assert not failed, os.strerror(ctypes.get_errno())
    socket.sethostname(host)


def _names(host: str) -> None:
    """What `enter` puts over /etc/hosts."""
    own = Path("/etc/netns") / host
    own.mkdir(parents=True, exist_ok=True)
    lines = ["127.0.0.1 localhost", *(f"{ADDRESS[name]} {name}" for name in ALL_HOSTS)]
    (own / "hosts").write_text("\n".join(lines) + "\n")
