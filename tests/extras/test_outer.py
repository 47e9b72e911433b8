"""The outer loop: its optimizers, what a holder enforces, and replicas of real runs."""

import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.conftest import Project, own_project, write_project
from tests.e2e.product import (
    Command,
    Ended,
    checkpoints,
    curve,
    events,
    records,
    started,
    steps_logged,
)
from tests.engines.cases import megatron
from tests.engines.parity_worker import Case, each_case
from tests.extras.outer_ranks import follow, plain_loss
from tests.forked import call_ranks
from tests.processes import in_thread, wait_until
from tests.toy.conftest import python_path, with_toys
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.store import folder_name
from toolkit.data.order import EpochOrder
from toolkit.errors import PlanError, RecipeError
from toolkit.extras.outer import OuterSection
from toolkit.extras.outer.engine import OfReplica
from toolkit.extras.outer.optimizer import OuterOptimizer, Weights, mean_gradient
from toolkit.extras.outer.rounds import Member, Refused, Rounds
from toolkit.extras.outer.states import states
from toolkit.extras.outer.wire import BLOCK, Connection
from toolkit.hardware.cluster_file import find_cluster
from toolkit.intake.load import load_recipe
from toolkit.launchers.launching import launch_recipe
from toolkit.report.record import read_record

__all__ = ["own_project", "python_path", "with_toys"]  # fixtures

SHAPES = {"w": (3, 700), "b": (3,)}


@pytest.mark.parametrize("how", ["nesterov", "sgd", "average"])
def test_optimizers_are_torchs(how: str) -> None:
    """Rounds of two replicas, and the same as changes that arrive one after the other."""
    settings = OuterSection(replicas=2, optimizer=how)
    chance = np.random.default_rng(0)
    rounds = chance.normal(size=(6, 2, 4)).astype(np.float32)
    tokens = [(1.0, 3.0), (2.0, 2.0), (0.0, 5.0), (1.0, 1.0), (4.0, 1.0), (7.0, 7.0)]
    weight = torch.nn.Parameter(torch.zeros(4))
    rate, momentum = (1.0, 0.0) if how == "average" else (0.7, 0.9)
    reference = torch.optim.SGD([weight], rate, momentum, nesterov=how == "nesterov")
    own = OuterOptimizer(settings, {"w": np.zeros(4, np.float32)})
    arriving = OuterOptimizer(settings, {"w": np.zeros(4, np.float32)})
    alike = torch.nn.Parameter(torch.zeros(4))
    alike_reference = torch.optim.SGD([alike], rate, momentum, nesterov=how == "nesterov")
    for changes, counts in zip(rounds, tokens, strict=True):
        weight.grad = -torch.from_numpy(np.average(changes, axis=0, weights=counts)).float()
        reference.step()
        pairs = list(zip(counts, ({"w": one.copy()} for one in changes), strict=True))
        own.step(mean_gradient(pairs))
        assert own.weights["w"] == pytest.approx(weight.detach().numpy(), rel=1e-5, abs=1e-6)
        alike.grad = -torch.from_numpy(changes.mean(axis=0))
        alike_reference.step()
        for one in changes:
            arriving.arrive({"w": -one}, replicas=2)
        found = arriving.weights["w"]
        assert found == pytest.approx(alike.detach().numpy(), rel=1e-5, abs=1e-6)


def test_replicas_have_every_sample_of_a_batch_once() -> None:
    whole = EpochOrder(3, 50)
    parts = [OfReplica(whole, 3, replica) for replica in range(3)]
    for batch in range(9):
        joined = np.stack([part.indices(4 * batch, 4) for part in parts], axis=1)
        assert joined.flatten().tolist() == whole.indices(12 * batch, 12).tolist()
    at_once = parts[1].indices(3, 30)
    assert at_once.tolist() == [int(parts[1].indices(3 + n, 1)[0]) for n in range(30)]


def test_eight_bits_are_within_half_a_step() -> None:
    """Of each block's own scale; and the rest of a message is not touched."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = Connection(socket.create_connection(server.getsockname()))
        theirs = Connection(server.accept()[0])
    chance = np.random.default_rng(1)
    sent = {"w": chance.normal(size=(3, 700)).astype(np.float32), "b": np.zeros(3, np.float32)}
    sender = threading.Thread(target=ours.send, args=({"it": 1}, sent, "int8"))
    sender.start()
    assert theirs.receive() == {"it": 1}
    found = theirs.weights(SHAPES, "int8")
    sender.join()
    assert theirs.received == ours.sent < 1.1 * sum(one.size for one in sent.values()) + 50
    for start in range(0, 2100, BLOCK):
        part = slice(start, start + BLOCK)
        exact, restored = sent["w"].reshape(-1)[part], found["w"].reshape(-1)[part]
        assert np.abs(exact - restored).max() <= np.abs(exact).max() / 127 / 2 * 1.0001
    assert not found["b"].any() and not theirs.lost()
    ours.close()
    assert theirs.lost()
    with pytest.raises(ConnectionError):
        theirs.receive()
    theirs.close()


def ones(factor: float) -> Weights:
    """A change of every element."""
    return {name: np.full(shape, factor, np.float32) for name, shape in SHAPES.items()}


def of_members(
    rounds: Rounds, *replicas: int, step: int = 0, begun: int | None = None
) -> list[Member]:
    """Replicas that have joined."""
    rounds.begin(ones(0.0))
    begun = step if begun is None else begun
    return [rounds.join(replica, step, begun, SHAPES)[0] for replica in replicas]


def value(rounds: Rounds) -> float:
    """Of the holder's weights, which are equal."""
    found = {float(one) for values in rounds.optimizer.weights.values() for one in values.flat}
    assert len(found) == 1
    return found.pop()


def test_no_replica_is_further_ahead_than_the_bound() -> None:
    settings = OuterSection(
        replicas=3, every_steps=5, overlap="delayed", staleness=2, optimizer="average"
    )
    rounds = Rounds(settings, OuterOptimizer(settings), expected={0, 1, 2})
    first, second, slow = of_members(rounds, 0, 1, 2)
    for number in (1, 2):
        assert rounds.hand_in(first, 5 * number, 1.0, ones(3.0))
        assert rounds.hand_in(second, 5 * number, 1.0, ones(0.0))
    assert value(rounds) == pytest.approx(2.0)  # 1/3 of each, at once
    with in_thread(lambda: rounds.hand_in(first, 15, 1.0, ones(3.0))) as third:
        wait_until(lambda: first.change, "a third round")
        assert not third and first.step == 10
        assert rounds.step == 0
        assert rounds.hand_in(slow, 5, 1.0, ones(0.0))  # the slowest comes one round further
    assert third == [True] and first.step == 15 and rounds.step == 5
    with in_thread(lambda: rounds.hand_in(first, 20, 1.0, ones(0.0))) as fourth:
        wait_until(lambda: first.change, "a fourth round")
        assert not fourth
        rounds.leave(slow)  # who has left holds nobody up
    assert fourth == [True] and rounds.step == 10


def test_what_is_sent_to_a_delayed_replica_is_of_one_instant() -> None:
    """What another one hands in while it is sent is not in it."""
    settings = OuterSection(replicas=2, every_steps=5, overlap="delayed", optimizer="average")
    rounds = Rounds(settings, OuterOptimizer(settings), expected={0, 1})
    one, other = of_members(rounds, 0, 1)
    assert rounds.hand_in(one, 5, 1.0, ones(2.0))
    sent = rounds.take()
    assert rounds.hand_in(other, 5, 1.0, ones(4.0))
    assert {*sent["w"].flat, *sent["b"].flat} == {1.0} and value(rounds) == 3.0


def test_what_a_resume_of_delayed_replicas_loses_is_told() -> None:
    settings = OuterSection(replicas=2, every_steps=5, overlap="delayed", optimizer="average")
    rounds = Rounds(settings, OuterOptimizer(settings))
    member, _ = of_members(rounds, 0, 1)
    for step in (5, 10):
        assert rounds.hand_in(member, step, 1.0, ones(1.0))
    rounds.leave(member)
    member, answer = rounds.join(0, 12, 10, SHAPES)
    assert answer["takes"] and answer["lost"] == 2
    rounds.leave(member)
    again = Rounds(settings, rounds.optimizer, step=0, counted={0: 5})
    assert again.join(0, 12, 10, SHAPES)[1]["lost"] == 7
    assert again.join(1, 3, 0, SHAPES)[1]["lost"] == 3


def test_a_replica_that_stops_while_it_waits_owes_the_exchange() -> None:
    """What it has handed in counts, and it takes the weights, if the others go on."""
    settings = OuterSection(replicas=2, every_steps=5, optimizer="average")
    rounds = Rounds(settings, OuterOptimizer(settings))
    (member,) = of_members(rounds, 0)
    of_members(rounds, 1)
    with pytest.raises(ConnectionError):
        rounds.hand_in(member, 5, 1.0, ones(2.0), lost=lambda: True)
    rounds.leave(member)
    assert rounds.step == 0
    again, answer = rounds.join(0, 5, 0, SHAPES)  # it saved step 5 before its exchange
    assert answer == {"step": 5, "takes": False, "lost": 0}
    with pytest.raises(ConnectionError):
        rounds.hand_in(again, 5, 1.0, ones(2.0), lost=lambda: True)
    rounds.leave(again)
    assert rounds.hand_in(rounds.live[1], 5, 1.0, ones(0.0))
    assert rounds.step == 5 and value(rounds) == 1.0
    _, late = rounds.join(0, 5, 0, SHAPES)
    assert late == {"step": 5, "takes": True, "lost": 0}
    assert rounds.stop() == [0, 1]


def test_a_change_that_is_not_finite_is_refused() -> None:
    settings = OuterSection(replicas=2, every_steps=5, optimizer="average")
    rounds = Rounds(settings, OuterOptimizer(settings))
    broken, sound = of_members(rounds, 0, 1)
    with in_thread(lambda: rounds.hand_in(sound, 5, 1.0, ones(1.0))) as other:
        wait_until(lambda: sound.change, "the change of replica 1")
        with pytest.raises(Refused, match="has values that are not finite"):
            rounds.hand_in(broken, 5, 1.0, ones(float("nan")))
        rounds.leave(broken)
    assert other == [True] and value(rounds) == 1.0


def test_rounds_with_replicas_that_leave_join_and_stop() -> None:
    settings = OuterSection(replicas=2, every_steps=5, optimizer="average")
    finished: list[tuple[list[int], float]] = []
    rounds = Rounds(
        settings,
        OuterOptimizer(settings),
        expected={0, 1},
        on_round=lambda *one: finished.append(one),
    )
    (zero,) = of_members(rounds, 0)
    with in_thread(lambda: rounds.hand_in(zero, 5, 1.0, ones(1.0))) as first:
        wait_until(lambda: zero.change, "the change of replica 0")
        assert not first, "it waits for one that has not joined"
        (one,) = of_members(rounds, 1)
        assert not first
        assert rounds.hand_in(one, 5, 3.0, ones(2.0))
    assert first == [True] and finished == [([0, 1], 4.0)] and value(rounds) == 1.75
    with in_thread(lambda: rounds.hand_in(zero, 10, 1.0, ones(1.0))) as second:
        wait_until(lambda: zero.change, "the change of replica 0")
        rounds.leave(one)
    assert second == [True] and finished[-1] == ([0], 1.0)
    one, answer = rounds.join(1, 3, 0, SHAPES)
    assert answer["takes"] and answer["step"] == 10
    rounds.leave(one)
    one, answer = rounds.join(1, 12, 10, SHAPES)
    assert not answer["takes"] and answer["step"] == 12, "it is inside of the same round"
    rounds.leave(one)
    with pytest.raises(Refused, match="checkpoints behind"):
        rounds.join(1, 15, 15, SHAPES)
    with pytest.raises(Refused, match="other tensors"):
        rounds.join(1, 10, 10, {"w": (3, 700)})
    of_members(rounds, 1, step=10)
    with in_thread(lambda: rounds.hand_in(zero, 15, 1.0, ones(1.0))) as third:
        wait_until(lambda: zero.change, "the change of replica 0")
        assert rounds.stop() == [0, 1]
    assert third == [False] and rounds.step == 10
    again = Rounds(settings, rounds.optimizer, 10, {0, 1, 2})
    (owing,) = of_members(again, 0, step=15, begun=10)
    again.give_up(2)  # it has ended, e.g. since it has done all steps
    with in_thread(lambda: again.hand_in(owing, 15, 1.0, ones(1.0))) as owed:
        wait_until(lambda: owing.change, "what replica 0 owes")
        assert not owed
        (other,) = of_members(again, 1, step=12, begun=10)
        assert again.hand_in(other, 15, 1.0, ones(1.0))
    assert owed == [True] and again.step == 15


FOLLOWING = [
    Case("ddp", 2),
    Case("ddp", 2, precision="bf16"),
    Case("fsdp", 2, stage=3),
    Case("fsdp", 2, stage=3, freeze=("*mlp*",)),
    Case("fsdp", 2, stage=1, precision="bf16"),
    *(Case("deepspeed", 2, stage=stage) for stage in range(4)),
    *(Case("deepspeed", 2, stage=stage, precision="bf16") for stage in range(4)),
    megatron(tensor=2),
    megatron(stage=1),
    replace(megatron(stage=1), precision="bf16"),
    replace(megatron(tensor=2), precision="bf16"),
    megatron(pipeline=2),
]


@pytest.mark.slow
def test_engines_compute_with_the_weights_that_are_put_into_them() -> None:
    """And train with them, and give them back: every element is written by exactly one rank.
    One cheap engine; the others are in soak."""
    assert_follow([Case("fsdp", 2, stage=3)])


@pytest.mark.soak
def test_every_engine_computes_with_the_weights_that_are_put_into_it() -> None:
    assert_follow(FOLLOWING)


def assert_follow(cases: list[Case]) -> None:
    found = call_ranks(each_case, 2, follow, cases)[0]
    for case in cases:
        one, expected = found[case.name], plain_loss(case, 2)
        tolerance = 1e-5 if case.precision == "fp32" else 0.02
        assert one["loss"] == pytest.approx(expected, rel=tolerance), case.name
        assert one["trained"] == pytest.approx(expected, rel=tolerance), case.name
        assert one["kept"], case.name


OUTER = {"parallel.outer.replicas": 2, "cluster.gpus_per_node": 1}


def replica(run: Path, number: int) -> Path:
    return run / "replicas" / str(number)


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """Of a checkpoint."""
    state = SavedState(run_dir / "checkpoints" / folder_name(step))
    found = {
        name: torch.cat([*state.in_pieces(quantity, name)])
        for quantity, name in state.names()
        if quantity == "weight"
    }
    state.close()
    return found


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    """Bitwise."""
    found, expected = weights(one, step), weights(other, step)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_mean_after_every_step_of_sgd_is_synchronous(
    with_toys: Callable[..., Ended], tmp_path: Path
) -> None:
    """Losses and weights of two replicas, in other layouts, are those of one plain run. Some
    replica's batch has more trained tokens than the other's."""
    common = {
        "optimizer.name": "toy_sgd",
        "optimizer.toy_sgd.momentum": 0.0,
        "optimizer.learning_rate": 0.1,
        "optimizer.clip_grad_norm": "null",
        "training.steps": 12,
        "cluster.gpus_per_node": 1,
        "checkpoint.export": "false",
    }
    outer = {**OUTER, "parallel.outer.every_steps": 1, "parallel.outer.optimizer": "average"}
    for run_dir, changes in {"plain": {}, "outer": outer}.items():
        ended = with_toys({**common, **changes}, "launch", "--run-dir", run_dir)
        assert ended.code == 0, ended.err
    plain = curve(tmp_path / "plain")
    folders = [replica(tmp_path / "outer", number) for number in (0, 1)]
    parts = [records(folder / "metrics.jsonl") for folder in folders]
    rounds = [event for event in events(tmp_path / "outer", "outer") if "tokens" in event]
    assert [event["step"] for event in rounds] == [*range(1, 13)]
    assert len({event["tokens"] for event in rounds}) > 1
    for step, (loss, _) in plain.items():
        tokens = [one[step - 1]["tokens"] for one in parts]
        losses = [one[step - 1]["loss"] for one in parts]
        assert np.average(losses, weights=tokens) == pytest.approx(loss, rel=1e-6)
    expected, found = (
        weights(tmp_path / "plain", 12),
        weights(replica(tmp_path / "outer", 1), 12),
    )
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    assert_same_weights(*folders, 12)
    whole = tmp_path / "outer"
    assert [event["exit_code"] for event in events(whole, "end")] == [0]
    *_, last, total = [event for event in events(whole, "outer") if "sent" in event]
    assert total["sent"] > last["sent"] and "tokens" not in total, "the last answers"
    report = read_record(whole)
    told = dict(report.rows())
    assert told["ended"].startswith("finished") and told["steps"].startswith("12 done")
    assert report.run.path == folders[0] and not report.missing
    assert [(one.run, one.state) for one in report.replicas] == [
        (str(folder), "done") for folder in folders
    ]
    more = {**common, **outer, "parallel.outer.replicas": 4}
    refused = with_toys(more, "launch", "--run-dir", "outer")
    assert refused.code == 2 and "are divided among 2" in refused.err
    (whole / "holder" / "step-00000012.safetensors").unlink()
    never = {**common, **outer, "checkpoint.resume": "never"}
    refused = with_toys(never, "launch", "--run-dir", "outer")
    assert refused.code == 2 and "resume is never" in refused.err
    assert not [*whole.rglob("*.ahead")]


STEPS = 120
LONG = {
    **OUTER,
    "training.steps": STEPS,
    "parallel.outer.every_steps": 4,
    "checkpoint.every_steps": 8,
    "checkpoint.export": "false",
}


def run_until(command: Command, run_dir: Path, step: int, number: int = 1) -> None:
    """Wait until a replica has logged a step."""
    command.wait_for(lambda: steps_logged(replica(run_dir, number)) >= step, f"step {step}")


@pytest.mark.slow
def test_a_stop_and_a_kill_of_all_change_no_bit(own_project: Project) -> None:
    """SIGTERM inside of a round, then SIGKILL of everything; each time the same command."""
    straight, broken = (own_project.folder / name for name in ("straight", "broken"))
    own_project.launch("straight", LONG)
    command = own_project.command("broken", LONG)
    with started(command, own_project.folder) as first:
        run_until(first, broken, 10)
        first.interrupt()
        ended = first.end(code=75)
    assert "Traceback" not in ended.err
    (state, *_) = states(broken / "holder")
    for number in (0, 1):
        last = checkpoints(replica(broken, number))[-1]
        assert state.step <= last <= state.step + 4
        assert events(replica(broken, number), "end")[-1]["exit_code"] == 75
    with started(command, own_project.folder) as second:
        run_until(second, broken, checkpoints(replica(broken, 1))[-1] + 25)
    # Whatever ran is killed now.
    own_project.launch("broken", LONG)
    for number in (0, 1):
        assert_same_weights(replica(broken, number), replica(straight, number), STEPS)


@pytest.mark.slow
def test_a_killed_replica_joins_again(own_project: Project) -> None:
    """The other continues, both end with the same weights; an event says what was missed."""
    run_dir = own_project.folder / "run"
    changes = {**LONG, "training.steps": 600, "launch.max_restarts": 3}
    changes["parallel.outer.compress"] = "int8"
    with started(own_project.command("run", changes), own_project.folder) as command:
        run_until(command, run_dir, 20)
        lock = json.loads((replica(run_dir, 1) / "lock").read_text())
        os.kill(lock["pid"], 9)
        ended = command.end(code=0)
    assert "Traceback" not in ended.err
    rounds = [event for event in events(run_dir, "outer") if "tokens" in event]
    assert [0] in [event["replicas"] for event in rounds]
    joins = [event["joined"] for event in events(run_dir, "outer") if "joined" in event]
    assert sorted(joins) == [0, 1, 1]
    (missed,) = events(replica(run_dir, 1), "warning")
    assert "are not trained" in missed["message"]
    assert_same_weights(replica(run_dir, 0), replica(run_dir, 1), 600)
    losses = [loss for loss, _ in curve(replica(run_dir, 0)).values()]
    assert losses[-1] < 0.6 * losses[0]


def test_what_disagrees_is_one_error_each(tmp_path: Path) -> None:
    recipe = write_project(tmp_path)
    outer = {"replicas": 3, "every_steps": 4, "optimizer": "average", "momentum": 0.9,
             "staleness": 3, "replica": 3}  # fmt: skip
    stated = [f"parallel.outer={json.dumps(outer)}", "checkpoint.every_steps=6"]
    with pytest.raises(RecipeError) as found:
        load_recipe(recipe, [*stated, "checkpoint.keep=1", "schedule.name=plateau"])
    keys = {problem.key for problem in found.value.problems}
    assert keys >= {
        "training.global_batch_size",
        "parallel.outer.momentum",
        "parallel.outer.staleness",
        "parallel.outer.replica",
        "parallel.outer.holder",
        "checkpoint.every_steps",
        "checkpoint.keep",
        "schedule.name",
    }
    with pytest.raises(RecipeError, match="a sequence per rank"):  # of a replica's batch
        load_recipe(recipe, ["parallel.outer={replicas: 8}", "training.micro_batch_size=auto"])


def test_what_replicas_cannot_be_launched_with(tmp_path: Path) -> None:
    """A cluster without words for it."""
    recipe = write_project(tmp_path)
    cluster = find_cluster("1x1xcpu")
    loaded = load_recipe(recipe, ["parallel.outer={replicas: 2}"], cluster)
    with pytest.raises(PlanError, match="the cluster is an object"):
        launch_recipe(loaded, tmp_path / "run", cluster)
