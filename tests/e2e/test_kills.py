"""Kills at random moments: a run that is started again becomes the undisturbed run."""

import random
import signal
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
from tests.e2e.product import checkpoints, events, steps_logged
from tests.forked import ForkedRanks
from tests.processes import wait_until
from toolkit.train.worker import train_recipe

EVERY_STEPS = 4
TRIALS = 10
"""Per layout, half of them with asynchronous saving."""
Undisturbed = Callable[[str], "Run"]


@dataclass(frozen=True)
class Run:
    """A run that nobody killed."""

    outcome: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(project: Project) -> Undisturbed:
    """The undisturbed run of a layout, made once."""
    made: dict[str, Run] = {}

    def of(layout: str) -> Run:
        if layout not in made:
            began = time.monotonic()
            name = f"undisturbed-{layout}"
            finish(project, name, changes(layout, asynchronous=True))
            made[layout] = Run(outcome(project.folder / name), time.monotonic() - began)
        return made[layout]

    return of


def changes(layout: str, *, asynchronous: bool) -> dict[str, object]:
    """Of the recipe, for a trial."""
    saving = {
        "checkpoint.every_steps": EVERY_STEPS,
        "checkpoint.asynchronous": str(asynchronous).lower(),
    }
    return LAYOUTS[layout] | saving


def start(project: Project, name: str, recipe: dict[str, object]) -> ForkedRanks:
    """Both ranks of a run, as a launcher would start them."""
    overrides = [f"{key}={value}" for key, value in recipe.items()]
    arguments = (project.recipe, overrides, project.folder / name)
    return ForkedRanks(train_recipe, arguments, 2, project.folder)


def finish(project: Project, name: str, recipe: dict[str, object]) -> None:
    """Start a run and let it come to its end."""
    ranks = start(project, name, recipe)
    assert ranks.end() == [0, 0], ranks.printed()


@pytest.mark.parametrize(
    ("layout", "trial"),
    [
        pytest.param("ddp", 99, marks=[pytest.mark.slow, pytest.mark.quick]),
        pytest.param("zero3", 99, marks=pytest.mark.slow),
        *(
            pytest.param(layout, trial, marks=pytest.mark.soak)
            for trial in range(TRIALS)
            for layout in LAYOUTS
        ),
    ],
)
def test_a_kill(project: Project, undisturbed: Undisturbed, layout: str, trial: int) -> None:
    """kill -9 of a random rank at a random moment."""
    asynchronous = trial % 2 == 0
    chance = random.Random(f"{layout}/{trial}")
    recipe = changes(layout, asynchronous=asynchronous)
    expected = undisturbed(layout)
    for attempt in range(1, 10):
        name = f"killed-{layout}-{trial}-{attempt}"
        run_dir = project.folder / name
        ranks = start(project, name, recipe)
        wait_for_a_moment(ranks, run_dir, chance, expected.seconds / attempt)
        rank = kill_a_rank(ranks, chance)
        codes = ranks.end()
        if -signal.SIGKILL in codes:
            break  # else it had ended before the moment came
    done, saved = steps_logged(run_dir), (checkpoints(run_dir) or [0])[-1]
    assert -signal.SIGKILL in codes
    finish(project, name, recipe)
    resumed = [event["step"] for event in events(run_dir, "load")]
    assert resumed == ([saved] if saved else []), "the newest complete checkpoint"
    lost = done - saved
    print(
        f"{layout} asynchronous={asynchronous}: rank {rank} killed at step {done}, "
        f"exit codes {codes}, {lost} steps lost"
    )
    # Asynchronously, a save may have been in flight, and the next one not yet begun.
    assert lost <= (2 * EVERY_STEPS - 1 if asynchronous else EVERY_STEPS)
    assert outcome(run_dir) == expected.outcome
    assert not list((run_dir / "checkpoints").glob("*.tmp"))


def wait_for_a_moment(
    ranks: ForkedRanks, run_dir: Path, chance: random.Random, seconds: float
) -> None:
    """Any moment of the run, also of its start and its end; mostly one in training."""
    if chance.random() < 0.4:
        time.sleep(chance.uniform(0, seconds))
        return
    step = chance.randint(1, 20)
    wait_until(
        lambda: steps_logged(run_dir) >= step or ranks.has_ended, f"step {step}", ranks.printed
    )
    time.sleep(chance.random() * 0.05)


def kill_a_rank(ranks: ForkedRanks, chance: random.Random) -> int | None:
    """Kill -9 a random rank; None when the run has ended."""
    alive = ranks.ranks()
    if not alive:
        return None
    rank = chance.choice(sorted(alive))
    with suppress(psutil.NoSuchProcess):
        alive[rank].kill()
    return rank


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "place", "newest"),
    [
        ("ddp", "begin=kill@rank1", 8),
        ("zero2", "written=kill@rank1", 8),
        ("zero3", "write=kill@rank0", 8),
        ("megatron-tp2", "copied=kill@rank1", 8),
        ("megatron-pp2", "manifest=kill@rank0", 8),
        ("megatron-tp2", "renamed=kill@rank0", 12),
        ("megatron-tp2", "latest=kill@rank0", 12),
    ],
)
def test_a_kill_in_the_third_save(
    project: Project, undisturbed: Undisturbed, layout: str, place: str, newest: int
) -> None:
    """By the launcher; every place of a save on every rank is in tests/checkpoint."""
    name = f"third-{layout}-{place.partition('=')[0]}"
    run_dir = project.folder / name
    recipe = changes(layout, asynchronous=True)
    ended = project.launch(name, recipe, env={"DMT_FAILPOINTS": f"checkpoint.{place},hit3"})
    assert ended.code == 4
    assert f"rank {place[-1]} was killed by SIGKILL" in ended.err
    assert checkpoints(run_dir)[-1] == newest
    ended = project.launch(name, recipe)
    assert ended.code == 0, ended.err
    assert events(run_dir, "load")[-1]["step"] == newest
    assert outcome(run_dir) == undisturbed(layout).outcome
