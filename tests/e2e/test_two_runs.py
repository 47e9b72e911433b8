"""Two runs in one run directory: one is refused, the other does not notice."""

from pathlib import Path

import pytest

from tests.e2e.conftest import Project
from tests.e2e.product import assert_saved_and_stopped, curve, events, started, steps_logged
from tests.processes import wait_until

pytestmark = pytest.mark.slow


def test_two_launches_at_once(project: Project, ddp_run: Path) -> None:
    """Both find the directory free: it becomes somebody's when the first worker is up."""
    argv = project.command("two-runs", {"training.steps": 100_000})
    run_dir = project.folder / "two-runs"
    with started(argv, project.folder) as first, started(argv, project.folder) as second:
        both = first.process, second.process
        wait_until(
            lambda: any(one.poll() is not None for one in both),
            "a refusal",
        )
        goes_on, refused = first, second
        if second.process.poll() is None:
            goes_on, refused = second, first
        told = refused.end()
        goes_on.wait_for(lambda: steps_logged(run_dir) >= 20, "twenty steps")
        third = project.launch(run_dir.name, {"training.steps": 100_000}, code=2)
        goes_on.interrupt()
        ended = goes_on.end()
    for refusal, prefix in ((told, "error"), (third, "dmt")):
        assert refusal.code == 2, refusal.err
        assert "Traceback" not in refusal.err
        said = f"{prefix}: {run_dir} belongs to a run that is still running: process "
        assert refusal.err.count(said) == 1, refusal.err
        assert refusal.err.count("or --run-dir OTHER") == 1
    assert_saved_and_stopped(ended, run_dir)
    assert {step: now for step, now in curve(run_dir).items() if step <= 20} == curve(ddp_run)
    assert len(events(run_dir, "start")) == 1
