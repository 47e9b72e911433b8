"""Training across two hosts, and what happens when one of them is cut off.

The one command, as root (Debian: apt-get install pdsh openssh-server iproute2):

    python -m pytest tests/e2e/test_two_hosts.py
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import Command, checkpoints, curve, events, steps_logged
from tests.e2e.two_hosts import HOSTS, NEEDS, TwoHosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.needs(*NEEDS)]
TWO = {"cluster.nodes": 2, "cluster.gpus_per_node": 1}
HANG_S = 8
LONG = {**TWO, "training.steps": 100_000, "launch.hang_timeout_s": HANG_S}


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def torchrun(hosts: TwoHosts, project: Project, name: str, changes: dict) -> list[Command]:
    """`dmt launch` on each host; both share the disk, as on a cluster."""
    meeting = {"launch.rendezvous": f"{HOSTS[0]}:29400"}
    command = project.command(name, {**changes, **meeting}, "--launcher", "torchrun")
    return [Command(hosts.on(host, command), project.folder, hosts.env) for host in HOSTS]


def deepspeed(
    hosts: TwoHosts, project: Project, name: str, changes: dict, launcher: str = "deepspeed"
) -> list[Command]:
    """`dmt launch` on the first host; the launcher starts the ranks of both by ssh."""
    hostfile = project.folder / "hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in HOSTS))
    stated = {**changes, "launch.hostfile": hostfile}
    command = project.command(name, stated, "--launcher", launcher)
    return [Command(hosts.on(HOSTS[0], command), project.folder, hosts.env)]


def openmpi(*run: Any) -> list[Command]:
    """The same by Open MPI's `mpirun`."""
    *where, changes = run
    return deepspeed(*where, {**changes, "launch.mpi.command": "mpirun.openmpi"}, "mpi")


def mpich(*run: Any) -> list[Command]:
    """The same by hydra, that of MPICH."""
    *where, changes = run
    return deepspeed(*where, {**changes, "launch.mpi.command": "mpirun.mpich"}, "mpi")


MPI = [
    pytest.param(start, marks=[pytest.mark.soak, pytest.mark.needs(package)])
    for start, package in ((openmpi, "openmpi-bin"), (mpich, "mpich"))
]
STARTS = pytest.mark.parametrize(
    "start",
    [torchrun, pytest.param(deepspeed, marks=pytest.mark.soak), *MPI],
    ids=lambda one: one.__name__,
)


@pytest.mark.parametrize("start", [torchrun, deepspeed, *MPI], ids=lambda one: one.__name__)
def test_the_same_losses(start, hosts: TwoHosts, project: Project, ddp_run: Path) -> None:
    run_dir = project.folder / f"two-{start.__name__}"
    commands = start(hosts, project, run_dir.name, {**TWO, "training.steps": 6})
    for command in commands:
        command.end(code=0)
    found, expected = curve(run_dir), curve(ddp_run)
    assert found == {step: pytest.approx(expected[step], rel=1e-5) for step in range(1, 7)}
    begun = events(run_dir, "start")
    assert [one["world"] for one in begun] == [2]


@STARTS
def test_a_host_is_cut_off(start, hosts: TwoHosts, project: Project) -> None:
    """The wire goes dead in mid-run: nobody waits indefinitely, and the user reads why."""
    run_dir = project.folder / f"cut-{start.__name__}"
    commands = start(hosts, project, run_dir.name, LONG)
    first = commands[0]
    first.wait_for(lambda: steps_logged(run_dir) > 3, "steps")
    hosts.cut(HOSTS[1])
    try:
        ended = first.end()
    finally:
        hosts.mend(HOSTS[1])
    assert ended.code == 4
    assert f"hang: nothing done for {HANG_S} s" in ended.err
    for command in commands[1:]:
        assert command.end().code == 4


@STARTS
def test_a_stop_on_one_host_saves_on_both(start, hosts: TwoHosts, project: Project) -> None:
    """Also where agents would start again what they take for a failure."""
    run_dir = project.folder / f"stop-{start.__name__}"
    changes = {**TWO, "training.steps": 100_000, "launch.max_restarts": 2}
    commands = start(hosts, project, run_dir.name, changes)
    first = commands[0]
    first.wait_for(lambda: steps_logged(run_dir) > 3, "steps")
    launcher = next(one for one in first.alive() if "launch" in one.cmdline())
    launcher.send_signal(signal.SIGTERM)
    for command in commands:
        command.end(code=75)
    assert checkpoints(run_dir) == [steps_logged(run_dir)]
    assert len(events(run_dir, "start")) == 1
