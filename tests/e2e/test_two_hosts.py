"""Training across two hosts, and what happens when one of them is cut off.

The one command, as root (Debian: apt-get install iproute2):

    python -m pytest tests/e2e/test_two_hosts.py
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.elastic_run import SIXTY, elastic_run, resized, sixty_steps
from tests.e2e.product import Command, checkpoints, curve, events, steps_logged
from tests.e2e.two_hosts import HOSTS, NEEDS, THIRD, TwoHosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.needs(*NEEDS)]
TWO = {"cluster.nodes": 2, "cluster.gpus_per_node": 1}
HANG_S = 8
LONG = {**TWO, "training.steps": 100_000, "launch.hang_timeout_s": HANG_S}


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def on_both(hosts: TwoHosts, project: Project, name: str, changes: dict) -> list[Command]:
    """`dmt launch` on each host; both share the disk, as on a cluster."""
    meeting = {"launch.rendezvous": f"{HOSTS[0]}:29400"}
    command = project.command(name, {**changes, **meeting}, "--launcher", "local")
    return [Command(command, project.folder, hosts.env(host)) for host in HOSTS]


def test_the_same_losses(hosts: TwoHosts, project: Project, ddp_run: Path) -> None:
    run_dir = project.folder / "two"
    commands = on_both(hosts, project, run_dir.name, {**TWO, "training.steps": 6})
    for command in commands:
        command.end(code=0)
    found, expected = curve(run_dir), curve(ddp_run)
    assert found == {step: pytest.approx(expected[step], rel=1e-5) for step in range(1, 7)}
    begun = events(run_dir, "start")
    assert [one["world"] for one in begun] == [2]


@pytest.mark.soak
def test_a_host_is_cut_off(hosts: TwoHosts, project: Project) -> None:
    """The wire goes dead in mid-run: nobody waits indefinitely, and the user reads why."""
    run_dir = project.folder / "cut"
    commands = on_both(hosts, project, run_dir.name, LONG)
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


def test_a_stop_on_one_host_saves_on_both(hosts: TwoHosts, project: Project) -> None:
    """Also where agents would start again what they take for a failure."""
    run_dir = project.folder / "stop"
    changes = {**TWO, "training.steps": 100_000, "launch.max_restarts": 2}
    commands = on_both(hosts, project, run_dir.name, changes)
    first = commands[0]
    first.wait_for(lambda: steps_logged(run_dir) > 3, "steps")
    first.process.send_signal(signal.SIGTERM)
    for command in commands:
        command.end(code=75)
    assert checkpoints(run_dir) == [steps_logged(run_dir)]
    assert len(events(run_dir, "start")) == 1


def test_a_host_is_cut_off_and_another_joins(hosts: TwoHosts, project: Project) -> None:
    """The run continues on the host that is left, and takes the new one in between two steps.
    Losses stay those of an undisturbed run."""
    expected = sixty_steps(project)
    with elastic_run(hosts, project, "elastic", HOSTS[0]) as run:
        for host in HOSTS:
            run.join(host, SIXTY)
        run.reach(4)
        with run.cut(HOSTS[1]):
            run.wait_for(lambda: resized(run.run_dir) == [(2, 1)], "the run on one host")
            with run.paused(HOSTS[0]):
                run.join(THIRD, SIXTY)
                run.wait_for(lambda: run.is_to_save(HOSTS[0]), "the third host")
            assert [run.end(host).code for host in (HOSTS[0], THIRD)] == [0, 0]
    assert run.losses == expected
    assert resized(run.run_dir) == [(2, 1), (1, 2)]
    *_, one, other = events(run.run_dir, "restart")  # before, if one came late
    # Of four steps, the save of the second is whole before that of the third begins.
    assert 2 <= one["from_step"] < other["from_step"]
    repeated = [event["dropped_metrics_lines"] for event in events(run.run_dir, "resume")]
    assert repeated[0] <= 2, "what was in flight"
    assert repeated[1] == 0, "a host that joins costs no step"


@pytest.mark.soak
def test_a_spare_replaces_a_killed_host(hosts: TwoHosts, project: Project) -> None:
    """It waits until then."""
    changes = {
        **SIXTY,
        "launch.elastic": "{min_nodes: 2, max_nodes: 2}",
    }
    expected = sixty_steps(project)
    with elastic_run(hosts, project, "spare", HOSTS[0]) as run:
        for host in (*HOSTS, THIRD):
            run.join(host, changes)
        run.reach(4)
        lost = next(host for host in (*HOSTS[1:], THIRD) if run.commands[host].ranks())
        spare = next(host for host in (*HOSTS[1:], THIRD) if host != lost)
        run.wait_for(lambda: run.has_met(spare), "the spare")
        hosts.kill_all(lost)
        assert [run.end(host).code for host in (HOSTS[0], spare)] == [0, 0]
    assert run.losses == expected
    assert resized(run.run_dir) == [(2, 2)]
    (resume,) = events(run.run_dir, "resume")
    assert resume["dropped_metrics_lines"] <= 2


@pytest.mark.soak
def test_a_spare_that_is_not_needed_leaves_with_the_run(
    hosts: TwoHosts, project: Project
) -> None:
    changes = {"launch.elastic": "{min_nodes: 2, max_nodes: 2}"}
    with elastic_run(hosts, project, "idle-spare", HOSTS[0]) as run:
        for host in (*HOSTS, THIRD):
            run.join(host, {"training.steps": 40, **changes})
        assert [run.end(host).code for host in (*HOSTS, THIRD)] == [0, 0, 0]
