"""A fault at every phase of a save, on every rank that passes it, synchronous and not."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoint.saving_ranks import EVERY_STEPS, KEEP, STEPS, Start, run

pytestmark = pytest.mark.slow

NOTHING_WRITTEN = ["begin", "copied"]
ON_EVERY_RANK = [*NOTHING_WRITTEN, "write", "written"]
BEFORE_THE_RENAME = ["hashed", "manifest"]
AFTER_THE_RENAME = ["renamed", "latest", "prune"]
"""The checkpoint counts from the rename on. Only rank 0 gets to these and to those before."""
PLACES = [
    *((phase, rank, bool(rank)) for phase in ON_EVERY_RANK for rank in (0, 1)),
    *(
        (phase, 0, bool(number % 2))
        for number, phase in enumerate(BEFORE_THE_RENAME + AFTER_THE_RENAME)
    ),
]
"""Phase, rank, and whether the save is asynchronous: in turn, as both ways share the phases."""


@pytest.fixture(autouse=True)
def single_rank() -> None:
    """The ranks are processes of their own here."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Each rank's state at the end of a run without a fault."""
    codes, told = run(Start(tmp_path_factory.mktemp("undisturbed"), asynchronous=True))
    assert codes == [0, 0]
    return [rank.state for rank in told]


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in the folder, which holds nothing else but `latest`."""
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names.pop(0) == "latest"
    return [int(name.removeprefix("step-")) for name in names]


@pytest.mark.parametrize(("phase", "rank", "asynchronous"), PLACES)
def test_a_kill(
    tmp_path: Path, undisturbed: list[str], phase: str, rank: int, asynchronous: bool
) -> None:
    # In the first save, and with older checkpoints: the third is the first to remove one.
    save = 1 if phase in NOTHING_WRITTEN else KEEP + 1
    hit = 1 if phase == "prune" else save
    start = Start(tmp_path, asynchronous)
    codes, _ = run(replace(start, faults=f"checkpoint.{phase}=kill@rank{rank},hit{hit}"))
    assert codes[rank] == -9
    assert codes[1 - rank] == 1, "the other rank notices and ends"

    complete = save if phase in AFTER_THE_RENAME else save - 1
    codes, told = run(start)
    assert codes == [0, 0]
    for mine, expected in zip(told, undisturbed, strict=True):
        assert mine.resumed_at == complete * EVERY_STEPS
        assert mine.state == expected
        assert (mine.skipped, mine.problems, mine.complaints) == ((), (), ())
    assert saved_steps(tmp_path) == [STEPS - EVERY_STEPS, STEPS]


@pytest.mark.parametrize(
    ("phase", "rank", "asynchronous"),
    [place for place in PLACES if place[0] not in NOTHING_WRITTEN],
)
def test_a_full_disk(
    tmp_path: Path, undisturbed: list[str], phase: str, rank: int, asynchronous: bool
) -> None:
    """The run goes on, its old checkpoint is there, and the next save works."""
    hit = 1 if phase == "prune" else 3
    faults = f"checkpoint.{phase}=full@rank{rank},hit{hit}"
    codes, told = run(Start(tmp_path, asynchronous, faults))
    assert codes == [0, 0]
    assert [mine.state for mine in told] == undisturbed
    for mine in told:
        lost, incomplete = mine.problems, mine.complaints
        if phase in AFTER_THE_RENAME:
            lost, incomplete = incomplete, lost
        assert incomplete == ()
        ((step, problem),) = lost
        assert step == 3 * EVERY_STEPS
        assert f"No space left on device: 'failpoint checkpoint.{phase}'" in problem
        assert problem.startswith(f"rank {rank}: ") or phase in AFTER_THE_RENAME
    kept = [3, 4] if phase in AFTER_THE_RENAME else [2, 4]
    assert saved_steps(tmp_path) == [save * EVERY_STEPS for save in kept]
