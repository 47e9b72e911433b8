"""Kills at random moments: a run that is started again becomes the undisturbed run."""

import json
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

from tests.e2e.conftest import WORDS, Project
from tests.e2e.layouts import LAYOUTS, outcome
from tests.e2e.product import checkpoints, events, steps_logged
from tests.forked import ForkedRanks
from tests.processes import wait_until
from toolkit.train.worker import train_recipe

EVERY_STEPS = 4
SFT: dict[str, object] = {
    "training.objective": "sft",
    "data.train": "{kind: chat, path: answers.jsonl}",
    "data.packing": "greedy",
}
LORA: dict[str, object] = {
    "model.init": "pretrained",
    "model.hub": "ddp/export",
    "adapter": "{rank: 4, alpha: 8, dropout: 0.1}",
}
TASKS: dict[str, dict[str, object]] = {"pretrain": {}, "sft": SFT, "lora": SFT | LORA}
TUNED = ("ddp", "fsdp3", "zero2", "megatron-tp2", "megatron-pp2")
"""Layouts of the soak runs of sft and lora."""
SOAK = [
    *(("pretrain", layout, trial) for trial in range(10) for layout in LAYOUTS),
    *(
        (task, layout, trial)
        for task in ("sft", "lora")
        for trial in range(4)
        for layout in TUNED
    ),
]
"""Half of the trials of each layout save asynchronously."""
Undisturbed = Callable[[str, str], "Run"]


@dataclass(frozen=True)
class Run:
    """A run that nobody killed."""

    outcome: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def undisturbed(project: Project, ddp_run: Path) -> Undisturbed:
    """The undisturbed run of a task in a layout, made once."""
    write_answers(project.folder / "answers.jsonl")
    assert (ddp_run / "export").exists(), "which lora starts from"
    made: dict[str, Run] = {}

    def of(task: str, layout: str) -> Run:
        name = f"undisturbed-{task}-{layout}"
        if name not in made:
            began = time.monotonic()
            finish(project, name, changes(task, layout, asynchronous=True))
            made[name] = Run(outcome(project.folder / name), time.monotonic() - began)
        return made[name]

    return of


def write_answers(path: Path) -> None:
    """Prompts and completions of which several share a row."""
    chance = random.Random(3)
    lines = []
    for _ in range(60):
        prompt, completion = (" ".join(chance.choices(WORDS, k=k)) for k in (1, 2))
        lines.append(json.dumps({"prompt": prompt, "completion": f" {completion}"}))
    path.write_text("\n".join(lines))


def changes(task: str, layout: str, *, asynchronous: bool) -> dict[str, object]:
    """Of the recipe, for a trial."""
    saving = {
        "checkpoint.every_steps": EVERY_STEPS,
        "checkpoint.asynchronous": str(asynchronous).lower(),
    }
    return TASKS[task] | LAYOUTS[layout] | saving


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
    ("task", "layout", "trial"),
    [
        pytest.param("pretrain", "ddp", 99, marks=[pytest.mark.slow, pytest.mark.quick]),
        *(pytest.param(*trial, marks=pytest.mark.soak) for trial in SOAK),
    ],
)
def test_a_kill(
    project: Project, undisturbed: Undisturbed, task: str, layout: str, trial: int
) -> None:
    """kill -9 of a random rank at a random moment."""
    asynchronous = trial % 2 == 0
    chance = random.Random(f"{task}/{layout}/{trial}")
    recipe = changes(task, layout, asynchronous=asynchronous)
    expected = undisturbed(task, layout)
    for attempt in range(1, 10):
        name = f"killed-{task}-{layout}-{trial}-{attempt}"
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
        f"{task} {layout} asynchronous={asynchronous}: rank {rank} killed at step {done}, "
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
