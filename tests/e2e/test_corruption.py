"""Random damage to the files of real checkpoints: always seen, told, and gone round."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import ZERO_2, Project
from tests.e2e.layouts import outcome
from tests.e2e.product import checkpoints, events
from toolkit.checkpoint.resume import find_newest
from toolkit.checkpoint.store import CheckpointStore
from toolkit.engines.distributed import join, leave

pytestmark = pytest.mark.slow

TRIALS = 24
SETTINGS = ZERO_2 | {"checkpoint.every_steps": 5}
DAMAGES = ["bit flip", "truncation", "deletion", "zeroing", "swapped ranks", "swapped steps"]


@pytest.fixture(scope="module")
def whole_run(project: Project) -> Path:
    """A finished run of two ranks with the checkpoints of steps 10, 15 and 20."""
    project.launch("whole", SETTINGS)
    assert checkpoints(project.folder / "whole") == [10, 15, 20]
    return project.folder / "whole"


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is all ranks."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    join()
    yield
    leave()


@pytest.mark.usefixtures("one_process")
def test_every_damage_is_found_and_named(whole_run: Path, tmp_path: Path) -> None:
    for trial in range(TRIALS):
        folder = shutil.copytree(whole_run / "checkpoints", tmp_path / str(trial))
        damage = DAMAGES[trial % len(DAMAGES)]
        damaged = make_damage(folder, damage, random.Random(trial))
        found = find_newest(CheckpointStore(folder, keep=3), expected=True)
        assert found is not None
        case = f"trial {trial}: {damage} of {damaged}"
        assert found.folder.name == f"step-{20 - 5 * len(damaged):08d}", case
        for told, (step, file) in zip(found.skipped, damaged, strict=True):
            assert told.startswith(f"{step}: ") and file in told, case
        shutil.rmtree(folder)


def test_a_damaged_checkpoint_is_gone_round(project: Project, whole_run: Path) -> None:
    """The whole product: a warning names the file, and the run becomes the same run."""
    run_dir = shutil.copytree(whole_run, project.folder / "damaged")
    ((step, file),) = make_damage(run_dir / "checkpoints", "bit flip", random.Random(1))
    ended = project.launch(run_dir.name, SETTINGS)
    assert f"warning: damaged checkpoint skipped: {step}: " in ended.err
    assert file in ended.err
    assert events(run_dir, "load")[-1]["step"] == 15
    assert outcome(run_dir) == outcome(whole_run)
    assert checkpoints(run_dir) == [10, 15, 20]


def make_damage(checkpoints: Path, damage: str, chance: random.Random) -> list[tuple[str, str]]:
    """Damage the newest checkpoint; each damaged folder, newest first, with a damaged file."""
    middle, newest = sorted(checkpoints.glob("step-*"))[-2:]
    if damage == "swapped ranks":
        swap(newest / "state-00000.safetensors", newest / "state-00001.safetensors")
        return [(newest.name, "state-0000")]
    if damage == "swapped steps":
        name = chance.choice(["manifest.json", *(f"state-{r:05d}.safetensors" for r in (0, 1))])
        swap(middle / name, newest / name)
        if name == "manifest.json":  # it says which one is newer, and not what the files are
            return [(middle.name, "state-0000"), (newest.name, "state-0000")]
        return [(newest.name, name), (middle.name, name)]
    path = chance.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    place = chance.randrange(len(content))
    if damage == "bit flip":
        content[place] ^= 1 << chance.randrange(8)
    elif damage == "truncation":
        del content[place:]
    elif damage == "zeroing":
        # Some values are zero already.
        start = next(i for i in (*range(place, len(content)), *range(place)) if content[i])
        stop = chance.randint(start + 1, len(content))
        content[start:stop] = bytes(stop - start)
    path.write_bytes(content)
    if damage == "deletion":
        path.unlink()
    return [(newest.name, path.name)]


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    assert first != second
    one.write_bytes(second)
    other.write_bytes(first)
