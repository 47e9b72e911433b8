"""Faults around the holder of `parallel.outer`: starts that overlap, settings that differ."""

import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.conftest import Project, own_project, write_project
from tests.e2e.product import checkpoints, events, started, steps_logged
from tests.processes import in_thread, wait_until
from toolkit.checkpoint.store import folder_name
from toolkit.errors import PlanError, RecipeError, RunFailed
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.holder import Holder, listening
from toolkit.extras.outer.launch import STARTED, Replicas
from toolkit.extras.outer.link import HolderLink
from toolkit.extras.outer.optimizer import OuterOptimizer, Weights
from toolkit.extras.outer.rounds import Rounds
from toolkit.extras.outer.states import note, notes, save, settle
from toolkit.features.base import resolved
from toolkit.intake.load import load_recipe
from toolkit.launchers.base import LOOPBACK, free_port
from toolkit.launchers.launching import Origin, launch_recipe
from toolkit.run.assignment import decide
from toolkit.run.directory import RunDirectory

__all__ = ["own_project"]  # fixture

SHAPES = {"w": (4,)}
SETTINGS = OuterSection(replicas=2, every_steps=5, optimizer="average")


def values(factor: float) -> Weights:
    return {"w": np.full(4, factor, np.float32)}


def test_a_later_start_of_a_replica_waits_for_the_end_of_the_earlier_one() -> None:
    """Which is noticed to be lost after the later one has come."""
    rounds = Rounds(SETTINGS, OuterOptimizer(SETTINGS))
    rounds.begin(values(0.0))
    (earlier, _), (other, _) = rounds.join(0, 0, 0, SHAPES), rounds.join(1, 0, 0, SHAPES)
    with in_thread(lambda: rounds.join(0, 0, 0, SHAPES)[0]) as later:
        with pytest.raises(ConnectionError):
            rounds.hand_in(earlier, 5, 1.0, values(1.0), lost=lambda: True)
        assert not later
        rounds.leave(earlier)
    assert rounds.live == {0: later[0], 1: other}
    with in_thread(lambda: rounds.hand_in(other, 5, 1.0, values(5.0))):
        wait_until(lambda: other.change, "the change of replica 1")
        assert rounds.hand_in(later[0], 5, 1.0, values(3.0))
    assert rounds.optimizer.weights["w"].tolist() == [4.0] * 4, "nothing of the earlier start"


def test_all_wait_for_the_first_weights() -> None:
    """Also if the start of replica 0 that had to give them is lost."""
    rounds = Rounds(SETTINGS, OuterOptimizer(SETTINGS))
    with in_thread(lambda: rounds.join(1, 0, 0, SHAPES)) as found:
        assert not found and not rounds.live
        rounds.begin(values(2.0))
    assert found[0][1] == {"step": 0, "takes": False, "lost": 0}
    rounds.begin(values(7.0))
    assert rounds.take()["w"].tolist() == [2.0] * 4


def test_a_step_that_is_saved_again_has_the_note_of_its_last_save(tmp_path: Path) -> None:
    """The first save, by a stop before the exchange, was killed."""
    run = RunDirectory(tmp_path)
    for step, begun in ((6, 4), (8, 4)):
        note(run, step, begun, 7.0)
    note(run, 8, 8, 0.0)
    assert notes(run) == {6: (4, 7.0)}


def test_a_kill_inside_of_the_first_save_ends_no_run(tmp_path: Path) -> None:
    """Of all saved states one is there, and replica 1 has no checkpoint."""
    rounds = Rounds(SETTINGS, OuterOptimizer(SETTINGS, values(0.0)), step=5)
    runs = [RunDirectory(tmp_path / str(number)) for number in (0, 1)]
    (runs[0].checkpoints / folder_name(5)).mkdir(parents=True)
    save(tmp_path, rounds, [0, 1], keep=3)
    state = settle(tmp_path, runs, delayed=False)
    assert state is not None and state.step == 5 and state.members == [0, 1]
    (runs[1].checkpoints / folder_name(7)).mkdir(parents=True)
    note(runs[1], 7, 6, 1.0)  # a checkpoint of another round is no excuse
    with pytest.raises(RunFailed, match="no step is in the checkpoints of all"):
        settle(tmp_path, runs, delayed=False)


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


def test_a_change_continues_replicas_that_were_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their launch, which has written no end, has a recipe of its own."""
    monkeypatch.setattr(Replicas, "command", EndsAtOnce.command)
    recipe, key, run = write_project(tmp_path), "optimizer.learning_rate", tmp_path / "run"
    stated = ["parallel.outer={replicas: 2}", "cluster.gpus_per_node=1"]
    assert launch_recipe(load_recipe(recipe, stated), run, check=False).exit_code == 2
    other = load_recipe(recipe, [*stated, f"{key}=0.0123"])
    with pytest.raises(RecipeError, match=f"--change {key}"):
        launch_recipe(other, run)
    assert launch_recipe(other, run, check=False, changes=[key]).exit_code == 2
    assert [event["key"] for event in events(run, "change")] == [key]


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with listening(f"{LOOPBACK}:{free_port()}") as found:
        yield found


def place(server: socket.socket) -> str:
    return "{}:{}".format(*server.getsockname())


CHANGES = {
    "cluster.gpus_per_node": 1,
    "training.steps": 8,
    "checkpoint.every_steps": 4,
    "checkpoint.export": "false",
}
OUTER = "{{replicas: 2, every_steps: 4, replica: 0, holder: '{}'}}"


@pytest.fixture
def served(own_project: Project, server: socket.socket) -> Iterator[Holder]:
    """A holder in this process, which waits for two replicas."""
    changes = {**CHANGES, "parallel.outer": OUTER.format(place(server))}
    stated = [f"{key}={value}" for key, value in changes.items()]
    recipe = resolved(load_recipe(own_project.recipe, stated))
    run = RunDirectory(own_project.folder)
    (run.path / "holder").mkdir()
    with closing(Holder(recipe, run, server, None, [])) as holder:
        holder.serve()
        yield holder


@pytest.mark.slow
def test_a_replica_that_waits_for_others_saves_when_it_is_stopped(
    own_project: Project, served: Holder, server: socket.socket
) -> None:
    """And does not go on behind the exchange that it owes if the holder stops then."""
    changes = {**CHANGES, "parallel.outer": OUTER.format(place(server))}
    command, run_dir = own_project.command("run", changes), own_project.folder / "run"

    def waits() -> bool:
        return any(member.change for member in served.rounds.live.values())

    for stop in ("replica", "holder"):
        with started(command, own_project.folder, {STARTED: "0"}) as replica:
            replica.wait_for(waits, "an exchange with replica 1")
            if stop == "replica":
                replica.interrupt()
            else:
                served.rounds.stop()
            assert "Traceback" not in replica.end(code=75).err
        wait_until(lambda: not served.rounds.live, "its end")
        begun, _ = notes(RunDirectory(run_dir))[4]
        assert begun == 0 and served.rounds.step == 0
        assert steps_logged(run_dir) == 4 and checkpoints(run_dir) == [4]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compress": "int8"}, "compress is int8, that of others none"),
        ({"replicas": 3}, "replicas is 3, that of others 2"),
        ({"training.seed": 5}, "training.seed is 5, that of others"),
    ],
)
def test_a_replica_with_other_settings_is_turned_away(
    served: Holder, server: socket.socket, changed: dict[str, Any], message: str
) -> None:
    """Else int8 would be read as fp32, and rounds would end at different steps."""
    training = served._recipe.training
    other = served.settings.model_copy(update=changed).shared(training) | changed
    stated = {"run": served._recipe.name, "replica": 1, "step": 0, "begun": 0}
    link = HolderLink(place(server), SHAPES, "none")
    with pytest.raises(RunFailed, match=message):
        link.join({**stated, "settings": other}, {})
    link.close()
    assert not served.rounds.live


def test_a_port_that_is_taken_is_the_users_mistake(server: socket.socket) -> None:
    with pytest.raises(PlanError, match="in use"):
        listening(place(server))
