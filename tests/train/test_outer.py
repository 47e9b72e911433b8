"""Replicas of real runs, which meet at a real lighthouse."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from torch.nn.functional import cross_entropy
from torchft.coordination import LighthouseServer

from tests.e2e.conftest import Project, own_project, write_project
from tests.e2e.product import Command, checkpoints, curve, events, started, steps_logged
from tests.processes import wait_until
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.store import folder_name
from toolkit.checkpoint.verify import verify
from toolkit.data.batches import GlobalBatches
from toolkit.data.build import build_data
from toolkit.data.order import EpochOrder
from toolkit.errors import RecipeError
from toolkit.intake.load import load_recipe
from toolkit.models import huggingface as hf
from toolkit.models.weights import WeightSource
from toolkit.train.outer import ReplicaOrder
from toolkit.train.stages import Stages

__all__ = ["own_project"]  # fixture

Both: TypeAlias = tuple[list[Command], list[Path]]
Undisturbed: TypeAlias = tuple[Project, dict[str, list[Path]]]

STEPS, EVERY = 12, 4
SETTINGS = {
    "training.steps": STEPS,
    "parallel.outer.replicas": 2,
    "parallel.outer.every_steps": EVERY,
    "checkpoint.every_steps": 2 * EVERY,
    "checkpoint.export": "false",
    "cluster.gpus_per_node": 1,
}


@contextmanager
def a_lighthouse(patience_s: float = 5.0) -> Iterator[str]:
    """The address of a lighthouse, which the environment names, too. For it, replicas live so
    long after a sign of life."""
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=int(1000 * patience_s)
    )
    address = server.address().replace(os.uname().nodename, "127.0.0.1")
    with patch.dict(os.environ, {"TORCHFT_LIGHTHOUSE": address}):
        yield address
    server.shutdown()


@pytest.fixture
def lighthouse() -> Iterator[str]:
    with a_lighthouse() as address:
        yield address


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, which is whole."""
    folder = run_dir / "checkpoints" / folder_name(step)
    assert not verify(folder).problems
    state = SavedState(folder)
    found = {
        name: torch.cat([*state.in_pieces("weight", name)])
        for quantity, name in state.names()
        if quantity == "weight"
    }
    state.close()
    return found


class Plain:
    """A replica in plain transformers and torch."""

    def __init__(self, project: Project, replica: int) -> None:
        recipe = load_recipe(project.recipe, [f"{k}={v}" for k, v in SETTINGS.items()])
        config = hf.build_config(recipe.model)
        self.model = hf.empty_model(config, torch.device("cpu"))
        source: WeightSource = hf.weight_source(recipe.model, config, recipe.training.seed)
        hf.fill(self.model, source)
        data = build_data(recipe.data, recipe.training, config.vocab_size)
        order: Any = SimpleNamespace(
            indices=lambda at, count: data.order.indices(2 * at, 2 * count)[replica::2]
        )
        self.batches = GlobalBatches(data.train, order, recipe.training.batches)
        self.clip = recipe.optimizer.clip_grad_norm
        decay = recipe.optimizer.weight_decay
        self.adamw = torch.optim.AdamW(
            [
                {"params": [one], "weight_decay": decay if one.ndim > 1 else 0.0}
                for one in self.model.parameters()
            ],
            lr=recipe.optimizer.learning_rate,
            betas=recipe.optimizer.betas,
            eps=recipe.optimizer.eps,
        )

    def step(self, number: int) -> float:
        (batch,) = self.batches.micro_batches(8 * number, 0, [8])
        logits = self.model(batch.input_ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        self.adamw.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.adamw.step()
        return loss.item()


def simulate(project: Project, *, delayed: bool) -> tuple[list[list[float]], dict[str, Any]]:
    """Losses of two plain replicas, and the weights at their end, by torch's SGD."""
    replicas = [Plain(project, number) for number in (0, 1)]
    models = [list(one.model.parameters()) for one in replicas]
    anchor = [torch.nn.Parameter(one.detach().clone()) for one in models[0]]
    outer = torch.optim.SGD(anchor, lr=0.7, momentum=0.9, nesterov=True)
    losses: list[list[float]] = [[], []]
    sent: list[list[torch.Tensor]] = []

    @torch.no_grad()
    def apply() -> None:
        for one, mean in zip(anchor, zip(*sent, strict=True), strict=True):
            one.grad = torch.stack(mean).mean(dim=0)
        before = [one.clone() for one in anchor]
        outer.step()
        for deltas, model in zip(sent, models, strict=True):
            for weight, delta, old, new in zip(model, deltas, before, anchor, strict=True):
                weight.add_(delta + new - old)
        sent.clear()

    for step in range(STEPS):
        for number, replica in enumerate(replicas):
            losses[number].append(replica.step(step))
        if (step + 1) % EVERY == 0:
            if sent:
                apply()
            sent += [
                [old.detach() - new.detach() for old, new in zip(anchor, model, strict=True)]
                for model in models
            ]
            if not delayed or step + 1 == STEPS:
                apply()
    return losses, dict(replicas[0].model.named_parameters())


def run_both(
    project: Project,
    changes: dict[str, Any],
    stack: ExitStack,
    fault: str = "",
    name: str = "run",
) -> Both:
    """Two replicas that have started, the second with a `fault`, and their run directories."""
    commands = []
    for number, faults in enumerate(("", fault)):
        argv = project.command(f"{name}{number}", changes)
        env = {"DMT_FAILPOINTS": faults, "REPLICA_GROUP_ID": str(number)}
        commands.append(stack.enter_context(started(argv, project.folder, env)))
    return commands, [project.folder / f"{name}{number}" for number in (0, 1)]


def end_both(commands: list[Command], code: int = 0) -> None:
    for command in commands:
        assert "Traceback" not in command.end(code=code).err


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Two replicas in each of both kinds of overlap, which nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_project(folder)
    project, found = Project(folder), {}
    for overlap in ("none", "delayed"):
        with ExitStack() as stack:
            stack.enter_context(a_lighthouse())
            changes = {**SETTINGS, "parallel.outer.overlap": overlap}
            commands, found[overlap] = run_both(project, changes, stack, name=overlap)
            end_both(commands)
    return project, found


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["none", "delayed"])
def test_two_replicas_are_the_plain_simulation(undisturbed: Undisturbed, overlap: str) -> None:
    """And the weights of both are equal to the bit at the end."""
    project, found = undisturbed
    runs = found[overlap]
    losses, expected = simulate(project, delayed=overlap == "delayed")
    for run, plain in zip(runs, losses, strict=True):
        assert [loss for loss, _ in curve(run).values()] == pytest.approx(plain, rel=1e-6)
    first, second = (weights(run, STEPS) for run in runs)
    for name, values in first.items():
        assert torch.equal(values, second[name]), name
        torch.testing.assert_close(values, expected[name].detach(), rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("lighthouse")
def test_replicas_that_differ_are_refused(own_project: Project) -> None:
    """One of them ends, with one error."""
    with ExitStack() as stack:
        commands = []
        for number in (0, 1):
            changes = {**SETTINGS, "training.global_batch_size": 8 * (number + 1)}
            command = own_project.command(f"run{number}", changes)
            env = {"REPLICA_GROUP_ID": str(number)}
            commands.append(stack.enter_context(started(command, own_project.folder, env)))
        wait_until(lambda: any(one.process.poll() for one in commands), "a refusal")
        (refused,) = (one for one in commands if one.process.poll() is not None)
        assert "error: the replicas cannot exchange weights" in refused.end(code=4).err


END = 40
LONG = {**SETTINGS, "training.steps": END, "launch.max_restarts": 3}


def exchanges(run: Path) -> list[int]:
    """The replicas of each exchange of a run."""
    return [one["replicas"] for one in events(run, "outer") if "replicas" in one]


@pytest.mark.slow
def test_a_killed_replica_comes_back(own_project: Project) -> None:
    """The other one continues; both end with the same weights, in shards of two ranks."""
    changes = {**LONG, "parallel.engine": "fsdp", "cluster.gpus_per_node": 2}
    with ExitStack() as stack:
        lighthouse = stack.enter_context(a_lighthouse(patience_s=1.0))
        commands, runs = run_both(own_project, changes, stack)
        commands[1].wait_for(lambda: steps_logged(runs[1]) >= 10, "step 10")
        killed, launcher = commands[1].ranks(), psutil.Process(commands[1].process.pid)
        launcher.suspend()  # a restart of warm ranks takes less than that patience
        for rank in killed.values():
            rank.kill()
        commands[0].wait_for(lambda: 1 in exchanges(runs[0]), "an exchange alone")
        # However long the restart takes, the other one must not come to its end before.
        others = commands[0].ranks().values()
        for rank in others:
            rank.suspend()
        launcher.resume()
        commands[1].wait_for(
            lambda: (
                commands[1].ranks().get(0, killed[0]) != killed[0]
                and meets(commands[1].ranks()[0], lighthouse)
            ),
            "the second start",
        )
        for rank in others:
            rank.resume()
        end_both(commands)
    assert exchanges(runs[0])[-1] == 2
    (missed,) = [one for one in events(runs[1], "warning") if one.get("source") == "outer"]
    assert "are not trained" in missed["message"]
    first, second = (weights(run, END) for run in runs)
    assert all(torch.equal(values, second[name]) for name, values in first.items())
    losses = [loss for loss, _ in curve(runs[0]).values()]
    assert losses[-1] < 0.8 * losses[0]


def meets(rank: psutil.Process, lighthouse: str) -> bool:
    """Whether a rank has told the lighthouse that it is there."""
    port = int(lighthouse.rpartition(":")[2])
    with suppress(psutil.Error):
        return any(one.raddr and one.raddr.port == port for one in rank.net_connections())
    return False


@pytest.mark.slow
def test_a_stop_while_others_are_waited_for(
    own_project: Project, undisturbed: Undisturbed
) -> None:
    """Both save, and continue with the exchange that they owe, as if nothing had happened."""
    with ExitStack() as stack:
        stack.enter_context(a_lighthouse(patience_s=3600))
        fault = "step=stop@hit6"
        commands, runs = run_both(own_project, SETTINGS, stack, fault)
        for command, run in zip(commands, runs, strict=True):
            command.wait_for(partial(waits, run), "an exchange")
            command.interrupt()
            assert "Traceback" not in command.end(code=75).err
            with suppress(psutil.Error, KeyError):
                commands[1].ranks()[0].resume()
    assert [checkpoints(run)[-1] for run in runs] == [8, 8]
    with ExitStack() as stack:
        stack.enter_context(a_lighthouse())
        commands, _ = run_both(own_project, SETTINGS, stack)
        end_both(commands)
    for run, other in zip(runs, undisturbed[1]["none"], strict=True):
        found, expected = weights(run, STEPS), weights(other, STEPS)
        assert all(torch.equal(values, expected[name]) for name, values in found.items())


def waits(run: Path) -> bool:
    """Whether a replica has done a round and its exchange has not happened for two seconds."""
    step, exchanged = steps_logged(run), [one["step"] for one in events(run, "outer")]
    time.sleep(2.0)
    return step == steps_logged(run) and step % EVERY == EVERY - 1 and step not in exchanged


def test_replicas_have_every_sample_of_a_batch_once() -> None:
    whole = EpochOrder(3, 50)
    parts = [ReplicaOrder(whole, 3, replica) for replica in range(3)]
    for batch in range(9):
        joined = np.stack([part.indices(4 * batch, 4) for part in parts], axis=1)
        assert joined.flatten().tolist() == whole.indices(12 * batch, 12).tolist()


def test_what_disagrees_is_one_error_each(tmp_path: Path) -> None:
    recipe = write_project(tmp_path)
    outer = "parallel.outer={replicas: 3, every_steps: 4}"
    with pytest.raises(RecipeError) as found:
        load_recipe(recipe, [outer, "checkpoint.every_steps=6", "schedule.name=plateau"])
    assert {problem.key for problem in found.value.problems} >= {
        "checkpoint.every_steps",
        "schedule.name",
    }


def test_a_launch_states_which_replica_it_is(own_project: Project) -> None:
    ended = own_project.launch("run", {"parallel.outer.replicas": 2}, code=2)
    assert "torchft_lighthouse" in ended.err and "Traceback" not in ended.err
    for replica, message in {
        "0": "TORCHFT_LIGHTHOUSE: here:80, not http://HOST:PORT",
        "2": "REPLICA_GROUP_ID: 2, not a number from 0 to 1",
    }.items():
        env = {"TORCHFT_LIGHTHOUSE": "here:80", "REPLICA_GROUP_ID": replica}
        with patch.dict(os.environ, env):
            ended = own_project.launch("run", {"parallel.outer.replicas": 2}, code=2)
        assert message in ended.err


def test_rank_0_says_which_replica_a_rank_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environments of its machines may differ."""
    changes = ["parallel.outer={replicas: 2, every_steps: 10}", "checkpoint.every_steps=10"]
    order, recipe = EpochOrder(8, 0), load_recipe(Path("llama-bytes"), changes)
    rank_0 = SimpleNamespace(rank_zero=lambda _: (1, "http://here:80"))
    rank: Any = SimpleNamespace(
        recipe=recipe, data=SimpleNamespace(order=order), together=rank_0
    )
    monkeypatch.setenv("REPLICA_GROUP_ID", "0")
    with suppress(AttributeError):  # it has no data to read
        Stages._read_data(rank)
    samples: Any = None
    _, seed = Stages._batches(rank, samples)
    assert seed == recipe.training.seed + (1 << 64)
