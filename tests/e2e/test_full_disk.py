"""A disk that is full costs checkpoints and lines of the logs, not the run."""

from pathlib import Path

import pytest

from tests.disks import make_room, small_file_system
from tests.e2e.conftest import Project
from tests.e2e.layouts import outcome
from tests.e2e.product import checkpoints, events, steps_logged

pytestmark = pytest.mark.slow

SMALL, LARGE = 1_000_000, 8_000_000
"""Bytes of a disk with room for two checkpoints, and for all that are kept."""
PAGE = 4096
"""Bytes of a disk with room for one file of a few lines."""


def test_no_room_for_checkpoints(project: Project, ddp_run: Path) -> None:
    run_dir, changes = project.folder / "full-disk", {"checkpoint.every_steps": 4}
    with small_file_system(run_dir / "checkpoints", SMALL) as disk:
        ended = project.launch(run_dir.name, changes, code=4)
        assert steps_logged(run_dir) == 20, "the run went on"
        assert checkpoints(run_dir) == [4, 8]
        told = [event["message"] for event in events(run_dir, "warning")]
        assert len(told) == 3
        for step, message in zip((12, 16, 20), told, strict=True):
            assert message.startswith(f"step {step} was not saved, training continues: rank ")
            assert "No space left on device" in message
        assert ended.err.count("error: ") == 1
        assert "error: step 20 could not be saved: " in ended.err
        assert ended.err.count("fix: make room and start the same command again") == 1
        assert "Traceback" not in ended.err
        assert not (run_dir / "export").exists()

        make_room(disk, LARGE)
        ended = project.launch(run_dir.name, changes)
        assert events(run_dir, "load")[-1]["step"] == 8
        assert checkpoints(run_dir) == [12, 16, 20]
        assert outcome(run_dir) == outcome(ddp_run)


def test_the_reason_of_a_failure_is_told_on_a_full_disk(project: Project) -> None:
    run_dir = project.folder / "full-disk-end"
    run_dir.mkdir()
    with small_file_system(run_dir / "small", PAGE) as disk:
        (run_dir / "events.jsonl").symlink_to(disk / "events.jsonl")
        (disk / "events.jsonl").write_text("{}\n" * (PAGE // 3) + "\n")
        env = {"DMT_FAILPOINTS": "step=raise@rank0,hit3"}
        ended = project.launch(run_dir.name, env=env, code=4)
    assert ended.err.count("error: RuntimeError: failpoint step") == 1
    assert "error: OSError" not in ended.err
