"""Checkpoints in the memory of machines: kills, lost machines, what is torn, outdated or full.

Each rank says itself on which machine it is: every machine has a folder of its own.
"""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.conftest import MANIFEST
from tests.checkpoint.saving_ranks import hash_of, part_of_the_state, train_step
from tests.disks import make_room, small_file_system
from tests.forked import ForkedRanks
from tests.processes import HANG_S, wait_until
from toolkit.checkpoint import memory_saver, saver, transfer
from toolkit.checkpoint.memory import (
    SHARED_MEMORY,
    MemoryNote,
    folder_of,
    hold,
    newest_kept,
    remove_unneeded,
)
from toolkit.checkpoint.memory_saver import MemorySaver
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.shards import QUANTITIES
from toolkit.engines.distributed import join
from toolkit.errors import CheckpointError

pytestmark = pytest.mark.slow

STEPS, LOST = 8, 4
"""Of a run, and the step at which machines are lost."""
PHASES = ["begin", "copied", "write", "written", "hashed", "latest"]
OWN = ["exchange", "exchanged", "manifest", "renamed"]
"""Those that differ from a save to storage: each machine commits here."""


@pytest.fixture(autouse=True)
def single_rank() -> None:
    """The ranks are processes of their own here."""


@pytest.fixture(name="tmp_path")
def folder_in_memory() -> Iterator[Path]:
    """Run directory and machines; on a tmpfs, as nothing else is accepted."""
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Start:
    """One start of the run that lives in `folder`, up to a step."""

    folder: Path
    machines: tuple[str, ...] = ("a", "b")
    """The machine of each rank."""
    steps: int = STEPS
    faults: str = ""
    columns: int = 5
    full_until: int | None = None
    """A step after which machine b gets room for two steps."""


@dataclass(frozen=True)
class Told:
    """What one rank has to tell of a start that it finished."""

    resumed_at: int
    loaded: list[list[float]]
    """Its part of each quantity after loading."""
    state: str
    skipped: list[str]
    problems: list[str]
    """Of each save; empty for one that worked."""


def run(start: Start) -> tuple[list[int | None], list[Told]]:
    """Exit codes, and what each rank tells if all came to the end."""
    world = len(start.machines)
    codes = ForkedRanks(_rank, [start], world, start.folder).end()
    if codes != [0] * world:
        return codes, []
    texts = [(start.folder / f"told-{rank}.json").read_text() for rank in range(world)]
    return codes, [Told(**json.loads(text)) for text in texts]


def _rank(start: Start) -> int:
    os.environ["DMT_FAILPOINTS"] = start.faults
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # does not end a rank of the product
    rank = join(timedelta(seconds=HANG_S)).rank
    base = start.folder / f"machine-{start.machines[rank]}"
    saver = MemorySaver(start.folder, str(base), asynchronous=True)
    told = _train(saver, start, rank)
    (start.folder / f"told-{rank}.json").write_text(json.dumps(asdict(told)))
    saver.close()
    dist.barrier()
    return 0


def _train(saver: MemorySaver, start: Start, rank: int) -> Told:
    shard = part_of_the_state(rank, len(start.machines), start.columns)
    kept, skipped = saver.newest()
    if kept is not None:
        folder, problem = saver.fetch(kept)
        assert problem is None
        saved = SavedState(folder)
        saved.load(shard)
        saved.close()
    resumed_at = 0 if kept is None else kept.manifest.step
    loaded = [shard.get(name).tolist() for name in QUANTITIES]
    problems = []
    for step in range(resumed_at + 1, start.steps + 1):
        train_step(shard, step)
        saver.save(replace(MANIFEST, step=step), [shard], {})
        outcome = saver.finished(wait=True)
        assert outcome is not None
        problems.append(outcome.problem or "")
        if step == start.full_until and rank == 0:
            make_room(start.folder / "machine-b", 4_500_000)
    return Told(resumed_at, loaded, hash_of(shard), skipped, problems)


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    """Each rank's state at the end of a run without a fault."""
    with TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        codes, told = run(Start(Path(folder)))
    assert codes == [0, 0]
    return [rank.state for rank in told]


def states(machine: Path) -> list[Path]:
    """The files that a machine has, oldest step first."""
    return sorted(machine.glob("dmt-*/step-*/state-*"))


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        *((phase, number % 2) for number, phase in enumerate(OWN)),
        *(pytest.param(one, 0, marks=pytest.mark.soak) for one in PHASES),
        *(pytest.param(one, 1, marks=pytest.mark.soak) for one in PHASES),
    ],
)
def test_a_kill_in_the_third_save(
    tmp_path: Path, undisturbed: list[str], phase: str, rank: int
) -> None:
    start = Start(tmp_path)
    codes, _ = run(replace(start, faults=f"checkpoint.{phase}=kill@rank{rank},hit3"))
    assert (codes[rank], codes[1 - rank]) == (-9, 1)
    codes, told = run(start)
    assert codes == [0, 0]
    # After a rename on either machine, all files are on it; both rename at about one time.
    possible = {"exchanged": {2, 3}, "hashed": {2, 3}, "manifest": {2, 3}}
    possible |= {"renamed": {3}, "latest": {3}}
    assert {mine.resumed_at for mine in told} <= possible.get(phase, {2})
    assert [mine.state for mine in told] == undisturbed
    assert not list(tmp_path.glob("machine-*/*/*.tmp"))


def test_nothing_counts_before_a_save_is_complete(tmp_path: Path) -> None:
    codes, _ = run(Start(tmp_path, faults="checkpoint.exchanged=kill@rank1"))
    assert codes == [1, -9]
    assert newest_kept(tmp_path) == 0
    _, told = run(Start(tmp_path, steps=1))
    assert [mine.resumed_at for mine in told] == [0, 0]
    assert newest_kept(tmp_path) == 1


def test_a_machine_is_lost_and_another_comes(tmp_path: Path, undisturbed: list[str]) -> None:
    run(Start(tmp_path, steps=LOST))
    shutil.rmtree(tmp_path / "machine-b")
    codes, told = run(Start(tmp_path, ("a", "c")))
    assert codes == [0, 0]
    assert [mine.resumed_at for mine in told] == [LOST, LOST]
    assert [mine.state for mine in told] == undisturbed


@pytest.mark.parametrize("machines", [("a",), ("d", "a", "a", "c", "d")])
def test_other_machines_and_another_number_of_ranks(
    tmp_path: Path, machines: tuple[str, ...]
) -> None:
    """Saved by machines of one, two and one ranks, of which the second is lost."""
    _, before = run(Start(tmp_path, ("a", "b", "b", "c"), steps=LOST))
    shutil.rmtree(tmp_path / "machine-b")
    _, same = run(Start(tmp_path, ("a", "d", "d", "c"), steps=LOST))
    _, other = run(Start(tmp_path, machines, steps=LOST))
    whole = [_joined(same, quantity) for quantity in range(len(QUANTITIES))]
    assert [mine.state for mine in same] == [mine.state for mine in before]
    assert [_joined(other, quantity) for quantity in range(len(QUANTITIES))] == whole
    assert {mine.resumed_at for mine in other} == {LOST}


def _joined(told: list[Told], quantity: int) -> list[float]:
    """A quantity of all ranks, one after the other."""
    return [value for mine in told for value in mine.loaded[quantity]]


@pytest.mark.parametrize("damage", ["torn", "missing", "without a manifest"])
def test_the_step_before_serves_when_the_newest_is_damaged(
    tmp_path: Path, undisturbed: list[str], damage: str
) -> None:
    run(Start(tmp_path, steps=LOST))
    for machine in ("a", "b"):
        file = states(tmp_path / f"machine-{machine}")[-1]
        if damage == "torn":
            os.truncate(file, file.stat().st_size - 1)
        else:
            (file if damage == "missing" else file.with_name("manifest.json")).unlink()
    codes, told = run(Start(tmp_path))
    assert codes == [0, 0]
    for mine in told:
        assert mine.resumed_at == LOST - 1
        said = [f"step {LOST} in memory: {file.name} is on no machine"]
        assert mine.skipped == ([] if damage == "without a manifest" else said)
    assert [mine.state for mine in told] == undisturbed


def test_a_machine_that_was_away_contributes_nothing(tmp_path: Path) -> None:
    """It has later steps of a start that was given up."""
    run(Start(tmp_path, steps=LOST + 2))
    away = (tmp_path / "machine-b").rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "machine-a")
    run(Start(tmp_path, ("a", "a"), steps=LOST))
    away.rename(tmp_path / "machine-b")
    _, told = run(Start(tmp_path, steps=LOST))
    assert [mine.resumed_at for mine in told] == [LOST, LOST]


@pytest.fixture
def small_memory(tmp_path: Path) -> Iterator[Path]:
    """A run of which machine b has room for less than two steps."""
    with small_file_system(tmp_path / "machine-b", 3_000_000):
        yield tmp_path


def test_a_machine_without_room(small_memory: Path) -> None:
    """Its peers do not wait for it, the step before stays, and later steps are saved."""
    codes, told = run(Start(small_memory, steps=6, columns=20_000, full_until=3))
    assert codes == [0, 0]
    for mine in told:
        assert [bool(problem) for problem in mine.problems] == [False, True, True] + 3 * [False]
        assert "No space left on device" in mine.problems[1]


def test_too_little_room_is_refused(small_memory: Path) -> None:
    codes = ForkedRanks(_refused, [small_memory], 2, small_memory).end()
    assert codes == [0, 0]


def _refused(folder: Path) -> int:
    base = folder / f"machine-{'ab'[join(timedelta(seconds=HANG_S)).rank]}"
    saver = MemorySaver(folder, str(base), asynchronous=True)
    saver.check_room(700_000)
    with pytest.raises(CheckpointError, match=r"needs 0\.01 GiB at rank 1, .* has 0\.00 free"):
        saver.check_room(3_000_000)
    torch.distributed.barrier()
    return 0


def test_folders_that_are_not_used(tmp_path: Path) -> None:
    """Names in /dev/shm are known to other users, and what is outdated is removed there."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert memory_saver._place(tmp_path / "mine", tmp_path)
    with pytest.raises(OSError, match="Not a directory"):
        memory_saver._place(tmp_path / "link", tmp_path)
    with pytest.raises(OSError, match="/proc/self is not on a tmpfs, but on proc"):
        memory_saver._place(Path("/proc/self/kept"), tmp_path)


def test_what_no_run_needs_is_removed(tmp_path: Path) -> None:
    names = ("finished", "failed", "live", "removed", "away")
    runs = {name: tmp_path / name for name in names}
    runs["disk is away"] = tmp_path / "nowhere" / "run"
    runs["not mounted"] = tmp_path / "empty" / "run"
    runs["not mounted"].parent.mkdir()
    folders = {name: folder_of(run, str(tmp_path / "memory")) for name, run in runs.items()}
    for folder in folders.values():
        folder.mkdir(parents=True)
    for name in names[:3]:
        runs[name].mkdir()
    MemoryNote("0" * 12, None).write(runs["failed"])
    held = {name: hold(folder, runs[name]) for name, folder in folders.items()}
    away = folders["away"].rename(f"{folders['away']}-of-another-host")
    for name in runs.keys() - {"live"}:
        os.close(held[name])
    remove_unneeded(tmp_path / "memory")
    left = {folders[name] for name in ("failed", "live", "disk is away", "not mounted")}
    assert {*(tmp_path / "memory").iterdir()} == left | {away}


def test_a_slow_save_is_heard_on_every_rank(tmp_path: Path) -> None:
    """Rank 1 is stopped before it writes until rank 0, which has, reports that."""
    ranks = ForkedRanks(
        _heard, [tmp_path], 3, tmp_path, {"DMT_FAILPOINTS": "checkpoint.write=stop@rank1"}
    )
    wait_until((tmp_path / "heard").exists, "the progress of rank 0", ranks.printed)
    stopped = ranks.ranks()[1]
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "rank 1 before its write")
    stopped.resume()
    assert ranks.end() == [0, 0, 0]


def _heard(folder: Path) -> int:
    """Rank 1's file is much larger than the others, and goes to rank 2."""
    rank = join(timedelta(seconds=HANG_S)).rank
    saver.LISTEN_S, transfer.PIECE = 0.01, 1 << 16
    memory = MemorySaver(folder, str(folder / f"machine-{rank}"), asynchronous=True)
    memory.save(MANIFEST, [part_of_the_state(rank, 3, 20_000 if rank == 1 else 5)], {})
    outcome = memory.finished(wait=True, tick=lambda _: (folder / "heard").touch())
    assert outcome is not None and outcome.problem is None
    sizes = [file.size for file in outcome.manifest.files.values()]
    assert memory._done >= max(sizes) > 5 * transfer.PIECE > 50 * min(sizes)
    memory.close()
    dist.barrier()
    return 0


def test_a_note_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    """The storage is full, the memory is not."""
    (tmp_path / ".memory.json.tmp").mkdir()
    codes = ForkedRanks(_without_note, [tmp_path], 1, tmp_path).end()
    assert codes == [0]
    assert newest_kept(tmp_path) == 2


def _without_note(folder: Path) -> int:
    rank = join(timedelta(seconds=HANG_S)).rank
    saver = MemorySaver(folder, str(folder / "machine-a"), asynchronous=True)
    problems = []
    for step in (1, 2):
        saver.save(replace(MANIFEST, step=step), [part_of_the_state(rank, 1, 5)], {})
        outcome = saver.finished(wait=True)
        assert outcome is not None
        problems.append(outcome.problem or "")
        if step == 1:
            (folder / ".memory.json.tmp").rmdir()
    assert "memory.json.tmp" in problems[0] and not problems[1]
    saver.close()
    return 0
