"""Faults around the holder of `parallel.outer`: starts that overlap, settings that differ."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import Project, own_project, write_project
from tests.e2e.product import checkpoints, events, started, steps_logged
from tests.processes import wait_until
from toolkit.errors import PlanError, RunFailed
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.holder import Holder, Served
from toolkit.extras.outer.launch import STARTED, Replicas, require_port
from toolkit.extras.outer.link import HolderLink
from toolkit.extras.outer.optimizer import OuterOptimizer
from toolkit.extras.outer.rounds import Lost, Rounds, Values
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import LOOPBACK, free_port
from toolkit.launchers.launching import Origin
from toolkit.models.families.tensors import Block
from toolkit.run.assignment import decide

__all__ = ["own_project"]  # fixture

SHAPES = {"w": [4]}
SETTINGS = OuterSection(replicas=2, every_steps=5, optimizer="average")


def rounds_of_two() -> Rounds:
    rounds = Rounds(SETTINGS, OuterOptimizer(SETTINGS))
    assert rounds.join(0, 1, 0, SHAPES)["gives"]
    return rounds


def values(factor: float) -> Values:
    return [(Block("w", (0, 4), None, False), np.full(4, factor, np.float32))]


def test_what_an_earlier_start_of_a_replica_still_sends_is_no_part_of_a_later_one() -> None:
    """Its other rank is noticed to be lost after the new start has joined."""
    rounds = rounds_of_two()
    rounds.give(values(0.0))
    before = rounds.member(0)
    rounds.leave(0, before)
    rounds.join(0, 1, 0, SHAPES)
    with pytest.raises(Lost):
        rounds.hand_in(0, 5, 1.0, values(1.0), before)
    rounds.leave(0, before)
    assert rounds.member(0).ranks == 0
    assert Lost.again, "the replica may be started again"


def test_all_join_again_if_who_gives_the_weights_is_lost() -> None:
    rounds = rounds_of_two()
    assert not rounds.join(1, 1, 0, SHAPES)["gives"]
    rounds.leave(0)
    with pytest.raises(Lost):
        rounds.hand_in(1, 5, 1.0, values(1.0))
    assert rounds.join(1, 1, 0, SHAPES)["gives"]
    rounds.give(values(2.0))
    assert rounds.hand_in(1, 5, 1.0, values(1.0))
    assert rounds.optimizer.weights["w"].tolist() == [3.0] * 4


class EndsAtOnce(Replicas):
    """Replica 1 has a mistake of its user's."""

    def command(self, replica: int) -> list[str]:
        return ["sh", "-c", "exit 2"] if replica else ["sleep", "60"]


def test_a_users_mistake_before_the_first_round_stops_all(tmp_path: Path) -> None:
    recipe = write_project(tmp_path)
    loaded = load_recipe(recipe, ["parallel.outer={replicas: 2}", "cluster.gpus_per_node=1"])
    assignment = decide(loaded, tmp_path / "run")
    settings = assignment.recipe.parallel.outer  # type: ignore[attr-defined]
    replicas = EndsAtOnce(
        assignment, settings, Origin(), None, (), [0, 1], f"{LOOPBACK}:{free_port()}"
    )
    assert replicas.start() == 2
    assert replicas._running[0].returncode == -signal.SIGTERM
    (failure,) = events(tmp_path / "run", "failure")
    assert failure["exit_code"] == 2


@pytest.fixture
def served(own_project: Project) -> Iterator[Holder]:
    """A holder in this process, which waits for two replicas."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place, events = "{}:{}".format(*server.getsockname()), own_project.folder / "events"
        name = load_recipe(own_project.recipe).name
        stated = OuterSection(replicas=2, every_steps=4, whole_batch=8).model_dump(mode="json")
        holder = Holder(
            own_project.folder,
            Served(
                name, stated, place, str(events), save_every=4, last=8, keep=2, expected=[1]
            ),
        )

        def accept() -> None:
            with suppress(OSError):
                while True:
                    stream = server.accept()[0]
                    threading.Thread(target=holder.serve, args=(stream,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield holder


@pytest.mark.slow
def test_a_replica_that_waits_for_others_saves_when_it_is_stopped(
    own_project: Project, served: Holder
) -> None:
    """And does not go on behind the exchange that it owes if the holder stops then."""
    changes = {
        "parallel.outer": "{replicas: 2, every_steps: 4, replica: 0, holder: "
        f"'{served.served.address}'}}",
        "cluster.gpus_per_node": 1,
        "training.steps": 8,
        "checkpoint.every_steps": 4,
        "checkpoint.export": "false",
    }
    command, run_dir = own_project.command("run", changes), own_project.folder / "run"

    def waits() -> bool:
        return any(member.complete for member in served.rounds.live.values())

    for stop in ("replica", "holder"):
        with started(command, own_project.folder, {STARTED: "0"}) as replica:
            replica.wait_for(waits, "an exchange with replica 1")
            if stop == "replica":
                replica.interrupt()
            else:
                served.rounds.stop()
            assert "Traceback" not in replica.end(code=75).err
        wait_until(lambda: not served.rounds.live, "its end")
        assert served.rounds.waiting == {0: 4} and served.rounds.step == 0
        assert steps_logged(run_dir) == 4 and checkpoints(run_dir) == [4]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def test_a_replica_with_other_settings_is_turned_away(
    tmp_path: Path, server: socket.socket
) -> None:
    """Else int8 would be read as fp32, and rounds would end at different steps."""
    place = "{}:{}".format(*server.getsockname())
    stated = SETTINGS.model_dump(mode="json")
    events = str(tmp_path / "events.jsonl")
    served = Served("run", stated, place, events, save_every=5, last=9, keep=2, expected=[])
    holder = Holder(tmp_path, served)
    thread = threading.Thread(target=lambda: holder.serve(server.accept()[0]), daemon=True)
    thread.start()
    other = SETTINGS.model_copy(update={"compress": "int8", "replica": 1, "holder": place})
    link = HolderLink(place, "run", 1, other)
    with pytest.raises(RunFailed, match="compress is int8, that of others none"):
        link.join(1, 0, SHAPES)
    link.close()
    thread.join(60)
    assert not holder.rounds.live


def test_a_port_that_is_taken_is_the_users_mistake(
    server: socket.socket,
) -> None:
    with pytest.raises(PlanError, match="in use"):
        require_port("{}:{}".format(*server.getsockname()))
