"""Training across two hosts, and what happens when one of them is cut off.

The one command, as root (Debian: apt-get install iproute2):

    python -m pytest tests/e2e/test_two_hosts.py
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.elastic_run import FORTY, elastic_run, forty_steps, resized
from tests.e2e.product import Command, checkpoints, curve, events, steps_logged
from tests.e2e.two_hosts import HOSTS, NEEDS, THIRD, TwoHosts, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.needs(*NEEDS)]


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        yield made


def test_a_stop_on_one_host_saves_on_both(
    hosts: TwoHosts, project: Project, ddp_run: Path
) -> None:
    """Also where agents would start again what they take for a failure. Both share the disk, as
    on a cluster; losses are those of one machine."""
    run_dir = project.folder / "stop"
    changes = {
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 1,
        "training.steps": 100_000,
        "launch.max_restarts": 2,
        "launch.rendezvous": f"{HOSTS[0]}:29400",
    }
    launch = project.command(run_dir.name, changes, "--launcher", "local")
    commands = [Command(launch, project.folder, hosts.env(host)) for host in HOSTS]
    first = commands[0]
    first.wait_for(lambda: steps_logged(run_dir) > 5, "steps")
    first.process.send_signal(signal.SIGTERM)
    for command in commands:
        command.end(code=75)
    assert checkpoints(run_dir) == [steps_logged(run_dir)]
    (begun,) = events(run_dir, "start")
    assert begun["world"] == 2
    found, expected = curve(run_dir), curve(ddp_run)
    for step in range(1, 7):
        assert found[step] == pytest.approx(expected[step], rel=1e-5)


def test_a_host_is_cut_off_and_another_joins(hosts: TwoHosts, project: Project) -> None:
    """The run continues on the host that is left, and takes the new one in between two steps.
    Losses stay those of an undisturbed run."""
    expected = forty_steps(project)
    with elastic_run(hosts, project, "elastic", HOSTS[0]) as run:
        for host in HOSTS:
            run.join(host, FORTY)
        run.reach(4)
        with run.cut(HOSTS[1]):
            run.wait_for(lambda: resized(run.run_dir) == [(2, 1)], "the run on one host")
            with run.paused(HOSTS[0]):
                run.join(THIRD, FORTY)
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
        **FORTY,
        "launch.elastic": "{min_nodes: 2, max_nodes: 2}",
    }
    expected = forty_steps(project)
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
