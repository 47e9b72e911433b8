"""A folder is a checkpoint only when it is complete."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from toolkit.checkpoint.store import CheckpointStore, Manifest, check_fits
from toolkit.engines.distributed import join, leave
from toolkit.errors import CheckpointError
from toolkit.plan.layout import Layout

MANIFEST = Manifest(
    step=1,
    consumed_samples=8,
    data_fingerprint="abc",
    engine="ddp",
    model="hf",
    layout=Layout(dp=2),
)


@pytest.fixture(autouse=True)
def single_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "unset")
        monkeypatch.delenv(name)
    join()
    yield
    leave()


def write(folder: Path) -> None:
    (folder / "state").write_text("weights")


def test_saved_checkpoint_is_found_with_its_manifest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    assert store.newest() is None
    folder = store.save(MANIFEST, write)
    assert store.newest() == folder == tmp_path / "step-00000001"
    assert Manifest.read(folder) == MANIFEST
    assert (folder / "state").read_text() == "weights"


def test_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (5, 10, 100):
        store.save(replace(MANIFEST, step=step), write)
    assert [path.name for path in store.complete()] == ["step-00000010", "step-00000100"]


def test_failure_while_writing_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    """PAINS 16: a partial checkpoint is taken for a whole one."""
    store = CheckpointStore(tmp_path, keep=1)
    old = store.save(MANIFEST, write)

    def fail(folder: Path) -> None:
        write(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        store.save(replace(MANIFEST, step=2), fail)
    assert store.newest() == old
    # The next save of the same step starts from an empty folder.
    assert store.save(replace(MANIFEST, step=2), write).name == "step-00000002"


def test_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "step-00000009.tmp").mkdir()
    (tmp_path / "step-00000009.tmp" / "manifest.json").write_text("{}")
    assert store.newest() is None


def test_micro_batch_may_change() -> None:
    layout = replace(MANIFEST.layout, micro_batch=4, gradient_accumulation=2, recompute="full")
    check_fits(MANIFEST, Path("c"), "ddp", "hf", layout)


@pytest.mark.parametrize(
    ("engine", "layout", "named"),
    [
        ("deepspeed", Layout(dp=2), "engine was ddp with model hf, is deepspeed"),
        ("ddp", Layout(dp=4), "dp was 2, is 4"),
        ("ddp", Layout(dp=2, zero_stage=3), "zero_stage was 0, is 3"),
        ("ddp", Layout(dp=2, offload_optimizer="cpu"), "offload_optimizer was none, is cpu"),
    ],
)
def test_other_layout_is_refused(engine: str, layout: Layout, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        check_fits(MANIFEST, Path("c"), engine, "hf", layout)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step": 1}', '{"layout": 3}'])
def test_damaged_manifest_is_named(tmp_path: Path, text: str) -> None:
    folder = CheckpointStore(tmp_path, keep=1).save(MANIFEST, write)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        Manifest.read(folder)
