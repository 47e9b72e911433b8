"""Faults around the holder of `parallel.outer`: starts that overlap, settings that differ."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from toolkit.errors import PlanError, RunFailed
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.holder import Holder, Served
from toolkit.extras.outer.launch import require_port
from toolkit.extras.outer.link import HolderLink
from toolkit.extras.outer.optimizer import OuterOptimizer
from toolkit.extras.outer.rounds import Lost, Rounds, Values
from toolkit.models.families.tensors import Block

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
