"""Kills at random moments: a run that is started again becomes the undisturbed run."""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Project
from tests.e2e.layouts import LAYOUTS, outcome
from tests.e2e.product import Command, checkpoints, events, started, steps_logged

EVERY_STEPS = 4
TRIALS = 10
"""Per layout, half of them with asynchronous saving."""


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody killed."""

    outcome: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Callable[[str], Undisturbed]:
    """The undisturbed run of a layout, made once."""
    made: dict[str, Undisturbed] = {}

    def of(layout: str) -> Undisturbed:
        if layout not in made:
            name = f"undisturbed-{layout}"
            ended = project.launch(name, changes(layout, asynchronous=True))
            assert ended.code == 0, ended.err
            made[layout] = Undisturbed(outcome(project.folder / name), ended.seconds)
        return made[layout]

    return of


def changes(layout: str, *, asynchronous: bool) -> dict[str, object]:
    """Of the recipe, for a trial."""
    saving = {
        "checkpoint.every_steps": EVERY_STEPS,
        "checkpoint.asynchronous": str(asynchronous).lower(),
    }
    return LAYOUTS[layout] | saving


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "asynchronous"), [("ddp", True), ("megatron-tp2", False)])
def test_a_kill(project: Project, undisturbed, layout: str, asynchronous: bool) -> None:
    kill_and_start_again(project, layout, 99, asynchronous, undisturbed(layout))


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_many_kills(project: Project, undisturbed, layout: str, trial: int) -> None:
    kill_and_start_again(project, layout, trial, trial % 2 == 0, undisturbed(layout))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "place", "newest"),
    [
        ("ddp", "renamed=kill@rank0", 12),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                ("ddp", "begin=kill@rank1", 8),
                ("zero2", "written=kill@rank1", 8),
                ("zero3", "write=kill@rank0", 8),
                ("megatron-tp2", "copied=kill@rank1", 8),
                ("megatron-pp2", "manifest=kill@rank0", 8),
                ("megatron-tp2", "latest=kill@rank0", 12),
            )
        ),
    ],
)
def test_a_kill_in_the_third_save(
    project: Project, undisturbed, layout: str, place: str, newest: int
) -> None:
    """The whole product; every place on every rank is in tests/checkpoint."""
    name = f"third-{layout}-{place.partition('=')[0]}"
    recipe = changes(layout, asynchronous=True)
    ended = project.launch(name, recipe, env={"DMT_FAILPOINTS": f"checkpoint.{place},hit3"})
    assert ended.code == 4
    assert f"{place[-5:-1]} {place[-1]} was killed by SIGKILL" in ended.err
    assert checkpoints(project.folder / name)[-1] == newest
    ended = project.launch(name, recipe)
    assert ended.code == 0, ended.err
    assert events(project.folder / name, "load")[-1]["step"] == newest
    assert outcome(project.folder / name) == undisturbed(layout).outcome


def kill_and_start_again(
    project: Project, layout: str, trial: int, asynchronous: bool, expected: Undisturbed
) -> None:
    """One trial: kill -9, look what is left, start again to the end."""
    chance = random.Random(f"{layout}/{trial}")
    name = f"killed-{layout}-{trial}"
    run_dir = project.folder / name
    recipe = changes(layout, asynchronous=asynchronous)
    with started(project.command(name, recipe), project.folder) as command:
        wait_for_a_moment(command, run_dir, chance, expected.seconds)
        rank = kill_a_rank(command, chance)
        ended = command.end()
    assert ended.code in (0, 4), ended.err
    assert "Traceback" not in ended.err
    done, saved = steps_logged(run_dir), (checkpoints(run_dir) or [0])[-1]

    ended = project.launch(name, recipe)
    assert ended.code == 0, ended.err
    resumed = [event["step"] for event in events(run_dir, "load")]
    assert resumed == ([saved] if saved else []), "the newest complete checkpoint"
    # Asynchronously, a save may have been in flight, and the next one not yet begun.
    lost_at_most = 2 * EVERY_STEPS - 1 if asynchronous else EVERY_STEPS
    lost = done - saved
    print(f"{layout} {asynchronous=} rank {rank} killed at step {done}: {lost} steps lost")
    assert lost <= lost_at_most
    assert outcome(run_dir) == expected.outcome
    left = [path.name for path in (run_dir / "checkpoints").glob("*.tmp")]
    assert not left


def wait_for_a_moment(
    command: Command, run_dir: Path, chance: random.Random, seconds: float
) -> None:
    """Any moment of the run, also of its start and its end; every other time in training."""
    if chance.random() < 0.5:
        time.sleep(chance.uniform(0, seconds))
    else:
        step = chance.randint(1, 20)
        reached = lambda: steps_logged(run_dir) >= step or has_ended(command)  # noqa: E731
        command.wait_for(reached, f"step {step}")
        time.sleep(chance.random() * 0.05)


def kill_a_rank(command: Command, chance: random.Random) -> int | None:
    """Kill -9 a random rank, as soon as there is one; None when the run has ended."""
    command.wait_for(lambda: command.ranks() or has_ended(command), "a rank")
    ranks = command.ranks()
    if not ranks:
        return None
    rank = chance.choice(sorted(ranks))
    with suppress(psutil.NoSuchProcess):
        ranks[rank].kill()
    return rank


def has_ended(command: Command) -> bool:
    return command.process.poll() is not None
