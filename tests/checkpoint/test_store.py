"""A folder is a checkpoint when it is complete and undamaged, at no other time."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoint.conftest import MANIFEST, make_state
from toolkit.checkpoint.manifest import Manifest
from toolkit.checkpoint.resume import find_newest
from toolkit.checkpoint.saved_state import SavedState
from toolkit.checkpoint.saver import SaveOutcome, Saver
from toolkit.checkpoint.shards import QUANTITIES
from toolkit.checkpoint.store import CheckpointStore
from toolkit.errors import CheckpointError

COMPANIONS = {"hf/config.json": b"{}"}


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Saver]:
    saver = Saver(CheckpointStore(tmp_path, keep=2), asynchronous=True)
    yield saver
    saver.close()


def save(saver: Saver, step: int) -> SaveOutcome:
    saver.save(replace(MANIFEST, step=step), make_state(step), COMPANIONS)
    saved = saver.finished(wait=True)
    assert saved is not None
    return saved


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_is_saved_is_found_and_loaded(
    saver: Saver, tmp_path: Path, asynchronous: bool
) -> None:
    saver.asynchronous = asynchronous
    assert find_newest(saver.store, expected=False) is None
    assert save(saver, 5).problem is None
    found = find_newest(saver.store, expected=True)
    assert found is not None
    assert found.folder == tmp_path / "step-00000005"
    assert replace(found.manifest, files={}) == replace(MANIFEST, step=5)
    assert (tmp_path / "latest").read_text() == "step-00000005\n"
    assert (found.folder / "hf" / "config.json").read_bytes() == b"{}"
    other = make_state(99)
    for shard in other:
        SavedState(found.folder).load(shard)
    for mine, theirs in zip(other, make_state(5), strict=True):
        for quantity in QUANTITIES:
            assert torch.equal(mine.get(quantity), theirs.get(quantity))


def test_pruning_leaves_alone_what_is_newer(saver: Saver) -> None:
    """transformers#25129: a run that went back must not lose what it has just written."""
    for step in (50, 60):
        save(saver, step)
    save(saver, 20)
    assert [path.name for path in saver.store.finished()] == [
        "step-00000020", "step-00000050", "step-00000060",
    ]  # fmt: skip


def test_a_large_state_may_overflow_in_its_sum(saver: Saver) -> None:
    state = make_state()
    state[0].get("exp_avg_sq").fill_(3e38)
    saver.save(MANIFEST, state, {})
    saved = saver.finished(wait=True)
    assert saved is not None and saved.problem is None


def test_a_state_that_is_not_finite_is_not_saved(saver: Saver) -> None:
    state = make_state()
    state[1].get("exp_avg")[3] = torch.nan
    saver.save(MANIFEST, state, {})
    saved = saver.finished(wait=True)
    assert saved is not None and saved.problem is not None
    assert "not finite" in saved.problem
    assert saver.store.finished() == []


def test_damaged_ones_are_skipped_with_the_reason(saver: Saver, tmp_path: Path) -> None:
    for step in (1, 2):
        save(saver, step)
    state = tmp_path / "step-00000002" / "state-00000.safetensors"
    content = bytearray(state.read_bytes())
    content[-3] ^= 1
    state.write_bytes(content)
    found = find_newest(saver.store, expected=True)
    assert found is not None and found.manifest.step == 1
    (told,) = found.skipped
    assert told.startswith("step-00000002: state-00000.safetensors was changed")
    assert (tmp_path / "step-00000002.damaged" / "manifest.json").exists(), (
        "kept, out of the way"
    )
    flip = tmp_path / "step-00000001" / "state-00000.safetensors"
    flip.write_bytes(flip.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"continue from, but step-00000001: state-0"):
        find_newest(saver.store, expected=False)


def test_a_step_that_is_damaged_twice_is_set_aside_twice(saver: Saver, tmp_path: Path) -> None:
    """transformers#25129: with keep=2, the good one must not go for the damaged one."""
    save(saver, 50)
    for _ in range(2):
        save(saver, 93)
        (tmp_path / "step-00000093" / "state-00000.safetensors").unlink()
        assert find_newest(saver.store, expected=True)
        assert [path.name for path in saver.store.finished()] == ["step-00000050"]
    assert (tmp_path / "step-00000093.damaged1").is_dir()
    save(saver, 100)
    names = [path.name for path in saver.store.finished()]
    assert names == ["step-00000050", "step-00000100"]


def test_a_checkpoint_under_the_name_of_another_step_is_not_continued(
    saver: Saver, tmp_path: Path
) -> None:
    for step in (5, 7):
        save(saver, step)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000009")
    found = find_newest(saver.store, expected=True)
    assert found is not None and found.folder == saver.store.of_step(7)
    assert found.skipped == (
        "step-00000009: it is the checkpoint of step 5: rename it to step-00000005",
    )
    assert (tmp_path / "step-00000009.damaged").is_dir()


def test_what_cannot_be_removed_does_not_stop_a_save(saver: Saver, tmp_path: Path) -> None:
    (tmp_path / "step-00000002.old.tmp").write_text("a file where a folder was")
    assert save(saver, 3).problem is None
    assert [path.name for path in saver.store.finished()] == ["step-00000003"]


def test_none_where_one_was_expected_is_an_error(saver: Saver, tmp_path: Path) -> None:
    """DeepSpeed: a missing `latest` restarts from 0 and exits 0."""
    with pytest.raises(CheckpointError, match="no finished checkpoint is there"):
        find_newest(saver.store, expected=True)
    save(saver, 1)
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="no finished checkpoint is there"):
        find_newest(saver.store, expected=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:0],
        lambda text: text[:0] + "[]",
        lambda text: text[:0] + '{"format": 1}',
        lambda text: text.replace('"step": 1', '"step": 3'),
        lambda text: text.replace('"consumed_samples": 8', '"consumed_samples": 9'),
        lambda text: text.replace('"tp": 1', '"tp": 2'),
        lambda text: text[: len(text) // 2],
    ],
)
def test_a_damaged_manifest_is_named(saver: Saver, tmp_path: Path, change) -> None:
    save(saver, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    changed = change(path.read_text())
    assert changed != path.read_text()
    path.write_text(changed)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Manifest.read(path.parent)


def test_an_older_manifest_does_not_know_the_tokens(saver: Saver, tmp_path: Path) -> None:
    """Unknown, not zero: a count that begins in the middle would be wrong."""
    save(saver, 1)
    folder = tmp_path / "step-00000001"
    assert Manifest.read(folder).consumed_tokens == 500
    content = json.loads((folder / "manifest.json").read_text())
    del content["consumed_tokens"], content["sha256"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    content["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content, indent=2) + "\n")
    assert Manifest.read(folder).consumed_tokens is None


def test_a_later_format_is_refused_with_what_to_do(saver: Saver, tmp_path: Path) -> None:
    save(saver, 1)
    path = tmp_path / "step-00000001" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7}))
    with pytest.raises(CheckpointError, match="has format 7, this release reads 1"):
        Manifest.read(path.parent)
