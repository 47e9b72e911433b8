"""Bad batches and bad machines: the run goes on without them, or stops and says why."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.hooks import hooked
from tests.e2e.product import checkpoints, curve, events, records

pytestmark = pytest.mark.slow


def faulty(fault: str) -> dict[str, str]:
    """The environment of a run, one rank of which has this fault."""
    return hooked("faulty_engine", DMT_TEST_FAULT=fault)


def test_a_nan_batch_on_one_rank_is_skipped_once(project: Project, ddp_run: Path):
    ended = project.launch("nan", env=faulty("nan@1,5"))
    run_dir = project.folder / "nan"
    (skip,) = events(run_dir, "skip")
    assert (skip["step"], skip["why"], skip["loss"]) == (5, "the loss is not finite", "NaN")
    assert ended.err.count("step 5  skipped: the loss is not finite") == 1
    assert [m["step"] for m in records(run_dir / "metrics.jsonl") if m["skipped"]] == [5]
    unspoiled, spoiled = curve(ddp_run), curve(run_dir)
    assert all(spoiled[step] == unspoiled[step] for step in range(1, 5))
    # One update fewer, and no harm done.
    assert spoiled[6] != unspoiled[6]
    assert spoiled[20][0] == pytest.approx(unspoiled[20][0], rel=0.1)


def test_a_flipped_bit_is_found_and_not_saved(project: Project):
    saving = {"checkpoint.every_steps": 1, "checkpoint.keep": 10}
    changes = {"guard.replica_check_every_steps": 4, **saving}
    ended = project.launch("flip", changes, env=faulty("flip@1,6"), code=4)
    (message,) = [line for line in ended.err.splitlines() if line.startswith("error:")]
    assert "step 8: rank 0 (" in message
    assert "), rank 1 (" in message
    assert message.endswith("there is no majority")
    assert "Weights were last equal at step 4" in ended.err
    # A start would load all replicas from one that is corrupt, and find them equal.
    assert checkpoints(project.folder / "flip") == [1, 2, 3, 4]
    aside = sorted(p.name for p in (project.folder / "flip" / "checkpoints").glob("*.suspect"))
    assert aside == [f"step-{step:08}.suspect" for step in (5, 6, 7)]
    assert f"{', '.join(aside)}".replace(".suspect", "") + " got the ending" in ended.err
    (end,) = [one for one in events(project.folder / "flip", "end") if "error" in one]
    assert end["retry"] is False
