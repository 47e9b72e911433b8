"""Meetings of elastic agents, by torch's own handlers."""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from tests.processes import wait_until
from toolkit.launchers import elastic_agent
from toolkit.launchers.base import Job
from toolkit.launchers.elastic_agent import ElasticAgent, wait_only_for_those_here
from toolkit.launchers.quiet_agent import ELASTIC
from toolkit.launchers.torchrun import TorchrunStarter
from toolkit.recipe.schema import ClusterSection, LaunchSection
from toolkit.run.directory import RunDirectory
from toolkit.run.events import EventLog


def together(*actions: Callable[[], object]) -> list[threading.Thread]:
    """Start these; at the end of the run, each that still waits is told so."""

    def act(action: Callable[[], object]) -> None:
        with suppress(RendezvousError):
            action()

    threads = [threading.Thread(target=act, args=[one], daemon=True) for one in actions]
    for thread in threads:
        thread.start()
    return threads


@pytest.mark.parametrize("before", [True, False], ids=["too early", "too late"])
def test_a_machine_that_missed_a_meeting_is_no_spare(
    before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw the others before they met, or after that."""
    monkeypatch.setattr(elastic_agent, "LAST_CALL_S", 0.5)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store = HashStore()
    first, second, third = (
        DynamicRendezvousHandler.from_backend(
            "run", store, C10dRendezvousBackend(store, "run"), 1, most, "127.0.0.1"
        )
        for most in (2, 2, 4)
    )
    if before:
        wait_only_for_those_here(third, 4)
        assert third.settings.max_nodes == 1
    for thread in together(first.next_rendezvous, second.next_rendezvous):
        thread.join()
    if not before:
        wait_only_for_those_here(third, 4)
        assert third.settings.max_nodes == 3
    together(third.next_rendezvous)
    wait_until(lambda: first.num_nodes_waiting() == 1, "the third")
    first.shutdown()


def test_a_newer_checkpoint_renews_the_restarts(tmp_path: Path) -> None:
    """Also without `launch.elastic`: `launch.max_restarts` are in a row."""
    nodes = ClusterSection(nodes=2)
    job = Job(tmp_path, nodes, LaunchSection(rendezvous="node-1:29400"), name="a", recipe="")
    assert TorchrunStarter().spec(job).env[ELASTIC] == str(tmp_path)

    agent = object.__new__(ElasticAgent)
    agent._run, agent._newest = RunDirectory(tmp_path), 0
    agent._worker_group = WorkerGroup(WorkerSpec("", 1, Mock(), entrypoint="x", max_restarts=2))
    agent._remaining_restarts = 0
    agent._count()
    assert agent._remaining_restarts == 0
    EventLog(agent._run.events).write("start", step=3)
    agent._count()
    assert agent._remaining_restarts == 2
